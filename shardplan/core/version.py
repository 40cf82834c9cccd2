"""The version of the package."""

__version__ = "0.1.0"


class UntestedVersionWarning(UserWarning):
    """An installed package is newer than the releases that the package was tested with."""
