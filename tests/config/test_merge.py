"""The strongest source of every key wins, whatever the combination."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_core.config.problem import Problems
from lmi_core.config.sources.command_line import parse_command_line
from lmi_core.config.sources.environment import read_environment
from lmi_core.config.sources.merge import merge
from lmi_core.config.sources.origin import Precedence
from lmi_core.config.sources.properties import parse_properties
from lmi_core.errors import ConfigError

SOURCES = ("option", "flag", "file", "variable", "alias", "tgi", "server_file")
"""Places that can set ``option.quantize``, strongest first."""

VALUES = dict(zip(SOURCES, ("awq", "gptq", "eetq", "exl2", "fp8", "marlin", "int8"), strict=True))


def resolve(chosen, order):
    problems = Problems()
    argv, environ, written = [], {}, []
    for source in order:
        if source not in chosen:
            continue
        value = VALUES[source]
        if source == "option":
            argv += ["--option", f"option.quantize={value}"]
        elif source == "flag":
            argv += ["--quantize", value]
        elif source in ("file", "server_file"):
            precedence = Precedence.FILE if source == "file" else Precedence.SERVER_FILE
            data = f"option.quantize={value}".encode()
            written += parse_properties(data, source, precedence, problems)
        else:
            name = {"variable": "OPTION_QUANTIZE", "alias": "HF_MODEL_QUANTIZE", "tgi": "QUANTIZE"}
            environ[name[source]] = value
    written += parse_command_line(argv, problems).settings
    written += read_environment(environ, problems)
    return merge(written, problems), problems


@given(st.sets(st.sampled_from(SOURCES), min_size=1), st.permutations(SOURCES))
def test_precedence_does_not_depend_on_order(chosen, order):
    values, problems = resolve(chosen, order)
    strongest = next(source for source in SOURCES if source in chosen)
    value = values.known["option.quantize"]
    assert value.value == VALUES[strongest]
    assert {s.text for s in value.overridden} == {VALUES[s] for s in chosen if s != strongest}
    assert not problems.errors


def test_every_pair_of_sources():
    for stronger, weaker in itertools.combinations(SOURCES, 2):
        assert resolve({stronger, weaker}, SOURCES)[0].get("option.quantize") == VALUES[stronger]


def merged(text, **kwargs):
    problems = Problems()
    settings = parse_properties(text, "f", Precedence.FILE, problems)
    return merge(settings, problems, **kwargs), problems


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (b"option.batch_size=3", "batch_size", 3),
        (b"max_dynamic_batch_size=3", "batch_size", 3),
        (b"option.max_batch_delay=3", "max_batch_delay", 3),
        (b"option.job_queue_size=3", "job_queue_size", 3),
        (b"option.quantization=awq", "option.quantize", "awq"),
        (b"option.max_num_seqs=3", "option.max_rolling_batch_size", 3),
        (b"option.tensor_parallel_size=3", "option.tensor_parallel_degree", 3),
    ],
)
def test_other_spellings(text, key, value):
    values, problems = merged(text)
    assert values.get(key) == value
    assert not problems.items


def test_two_spellings_with_different_values_conflict():
    _, problems = merged(b"option.max_num_seqs=8\noption.max_rolling_batch_size=16\n")
    assert "two spellings of one option" in str(problems.errors[0])
    assert "f:1" in str(problems.errors[0])
    assert not merged(b"option.max_num_seqs=8\noption.max_rolling_batch_size=8\n")[1].errors


def test_the_unprefixed_key_wins_over_its_prefixed_twin():
    values, problems = merged(b"option.batch_size=8\nbatch_size=16\n")
    assert values.get("batch_size") == 16
    assert [s.key for s in values.known["batch_size"].overridden] == ["option.batch_size"]
    assert not problems.errors


def test_unknown_keys_are_kept_with_a_warning_and_are_errors_when_strict():
    values, problems = merged(b"option.max_modell_len=3\n")
    assert values.unknown["option.max_modell_len"].text == "3"
    assert str(problems.warnings[0]) == (
        "f:1: unknown key 'option.max_modell_len'; did you mean option.max_model_len?"
    )
    assert merged(b"option.max_modell_len=3\n", strict=True)[1].errors


def test_a_key_without_value_is_not_used():
    values, problems = merged(b"option.revision=\n")
    assert not values.known
    assert "has no value" in str(problems.warnings[0])


def test_all_errors_are_raised_together_with_their_lines():
    _, problems = merged(b"option.dtype=fp17\nbatch_size=0\noption.max_sparsity=2\n")
    with pytest.raises(ConfigError) as caught:
        problems.raise_errors()
    assert len(caught.value.problems) == 3
    assert caught.value.problems[0].startswith("f:1: option.dtype='fp17' is not one of auto")
    assert caught.value.exit_code == 2
    assert caught.value.field == "option.dtype"


def test_secrets_are_masked():
    problems = Problems()
    settings = parse_command_line(["--api-key", "hunter2"], problems).settings
    assert merge(settings, problems).known["option.api_key"].shown == "********"


@pytest.mark.parametrize(
    ("argv", "key", "wanted"),
    [
        (["--max-model-len", "300", "--max-model-len", "400"], "option.max_model_len", 400),
        (["-o", "option.quantize=awq", "--option", "quantize=int8"], "option.quantize", "int8"),
        (
            ["--no-enable-prefix-caching", "--enable-prefix-caching"],
            "option.enable_prefix_caching",
            True,
        ),
    ],
)
def test_a_flag_that_is_repeated_overrides_the_one_before(argv, key, wanted):
    problems = Problems()
    values = merge(parse_command_line(argv, problems).settings, problems)
    assert not problems.errors
    assert values.get(key) == wanted
    assert len(values.known[key].overridden) == 1
