"""The check that tests which options cite set their keys."""

import subprocess
import sys

from lmi_core.config.resolve import examine
from lmi_core.config.table import OPTIONS
from tests.config.citations import cited_tests, keys_set, untrue_citations

from .cases import CPU, NO_CACHE

CITED = {("a", "lmi"): {"t::one", "t::two"}, ("b", "server"): {"t::two"}}


def test_one_of_the_cited_tests_sets_the_key():
    assert not untrue_citations({"t::one": {"a"}, "t::two": {"b"}}, CITED)
    (line,) = untrue_citations({"t::one": {"a"}, "t::two": set()}, CITED)
    assert line == "b (server) cites t::two: it never sets b"
    assert len(untrue_citations({"t::one": set(), "t::two": set()}, CITED)) == 2


def test_what_did_not_run_is_not_judged():
    assert not untrue_citations({"t::one": set()}, CITED)


def test_every_honoured_option_cites_some():
    cited = cited_tests(OPTIONS)
    assert cited["option.dtype", "lmi"] == {"tests/config/test_honoured.py::test_data_types"}
    assert not any("[" in test for tests in cited.values() for test in tests)


def test_keys_of_this_process_and_of_one_that_it_starts():
    with keys_set() as keys:
        examine(("org/m", "-o", "dtype=bf16"), {**NO_CACHE, "SERVING_PORT": "1"}, CPU)
        command = [sys.executable, "-m", "lmi_core", "explain", "org/m", "--max-model-len", "9"]
        subprocess.run(command, env={**NO_CACHE, "OPTION_SEED": "1"}, capture_output=True)
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert {"option.dtype", "option.max_model_len", "option.seed"} <= keys
    assert "option.block_size" not in keys
