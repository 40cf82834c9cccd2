"""`python -m shardplan`."""

from shardplan.cli.main import console

if __name__ == "__main__":
    console()
