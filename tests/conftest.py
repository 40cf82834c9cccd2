"""Shared by all tests."""

import gc
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: a change must not fail by an old fault that another draw finds. `make exhaustive` draws others, and more
# (`examples` of tests/sampling.py).
settings.register_profile("fixed", derandomize=True, max_examples=34)
settings.load_profile("fixed")

# Garbage collections go through whatever lives: here torch, transformers and all test modules, again and again, for nothing.
gc.disable()  # until these are imported

# `pytest` alone, unlike `python -m pytest`, does not put the project's root on the path.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import tests.unbounded  # noqa: E402, F401

# Around every test.
from tests.left_behind import nothing_is_left, nothing_is_left_of_a_file  # noqa: E402, F401

# The files of `make quick`: their tests need no torch, but for those that are marked `torch`.
QUICK = {
    "test_bind",
    "test_bind_names",
    "test_bind_speed",
    "test_check_examples",
    "test_check_fuzz",
    "test_check_sections",
    "test_check_sizes",
    "test_check_structure",
    "test_check_words",
    "test_cli",
    "test_cli_fuzz",
    "test_cli_lint",
    "test_cli_list",
    "test_code_pages",
    "test_completion",
    "test_conditions",
    "test_drift",
    "test_fmt",
    "test_fuzz_parse",
    "test_generated",
    "test_gpu_parts",
    "test_lazy",
    "test_left_behind",
    "test_models_auto",
    "test_parse_codes",
    "test_parse_expressions",
    "test_parse_extends",
    "test_parse_foreign",
    "test_parse_globs",
    "test_parse_lint",
    "test_parse_plan",
    "test_parse_readers",
    "test_proof_meshes",
    "test_render_json",
    "test_render_proof",
    "test_render_text",
    "test_report",
    "test_rooms",
    "test_sampling",
    "test_schema",
    "test_site",
    "test_versions",
    "test_walk",
    "test_reduced_model_counts",
}


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Plans that `auto` derives are kept here, and not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_from_one_server(own_cache):
    """Before a test of a command starts another."""
    if processes := sys.modules.get("processes"):
        processes.fork_server()


@pytest.fixture
def no_repairs(monkeypatch):
    """For tests that compare codes alone."""
    from tests.compiling import look_for_no_repairs

    look_for_no_repairs(monkeypatch)


@pytest.fixture(scope="module")
def compiled_once():
    """For files that apply the same few plans again and again, and change nothing of the compiler."""
    from tests.compiling import compile_once

    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch.setattr)
        yield


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the tests that need no torch, and none can import it")
    parser.addoption("--share", type=int, default=1, metavar="N", help="one in N of the tests (all)")
    parser.addoption("--seed", type=int, default=0, help="what they are drawn by")


def pytest_configure(config):
    if config.getoption("quick"):
        assert {path.stem for path in Path(__file__).parent.glob("test_*.py")} >= QUICK, "a file of QUICK is gone"
        assert "torch" not in sys.modules
        sys.modules["torch"] = None  # an import of it fails, in the test that does it


def pytest_ignore_collect(collection_path, config):
    """Leave out the files that are not quick, before they import what they need."""
    if config.getoption("quick") and collection_path.name.startswith("test_"):
        return collection_path.stem not in QUICK


def pytest_collection_finish():
    """From here on collections are rare, and pass over what there is now."""
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.by_file import ByFile

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")  # before -m and -k look at them
def pytest_move(config, items):
    from tests.sampling import move

    whole = config.args == config.getini("testpaths") and not config.option.quick
    idle = move(items)
    config.idle_lines = idle if whole else []  # where not all tests are here, a line may name others


@pytest.hookimpl(trylast=True)  # of those that -m and -k leave
def pytest_collection_modifyitems(config, items):
    from tests.sampling import share_of

    if config.option.share > 1 and items:
        kept = share_of(items, config.option)
        config.hook.pytest_deselected(items=list({*items} - {*kept}))
        items[:] = kept
