"""The reference page and the help are what the option table says."""

import re

from lmi_core.config.reference import PAGE, command_help, flags_help, reference_page
from lmi_core.config.table import BY_FLAG, BY_KEY, OPTIONS
from lmi_core.config.table.option import SYSTEMS

from .test_table import LMI_KEYS, TGI_FLAGS


def test_the_page_is_not_stale():
    hint = "run: python -m lmi_core.config.reference > lmi_core/config/REFERENCE.md"
    assert PAGE.read_text() == reference_page(), hint


def section(title):
    return reference_page().split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_documented_key_is_in_its_section():
    for system, keys in LMI_KEYS.items():
        text = section(SYSTEMS[system])
        for key in keys:
            assert f"| `{BY_KEY[key].key}` |" in text
            assert f"`{key}`" in text


def test_every_launcher_flag_is_in_its_section_and_in_the_help():
    text, flags = section(SYSTEMS["tgi"]), flags_help()
    for flag, variable in TGI_FLAGS.items():
        assert f"`{flag}`" in text
        assert flag in flags
        if BY_FLAG[flag].flag.name == flag:
            assert f"`{variable}`" in text


def test_every_line_has_six_cells():
    page = reference_page().split("\n## Other libraries' engines\n")[0]
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(lines) == sum(len(option.systems) for option in OPTIONS)
    for line in lines:
        assert line.replace("\\|", "").count("|") == 7


def test_other_libraries_have_a_section():
    text = section("Other libraries' engines")
    assert "| Key | vLLM | TensorRT-LLM | vLLM Neuron |" in text
    row = "| `option.max_model_len` | mapped to `max_model_len` | mapped to `max_seq_len` |"
    assert f"{row} mapped to `max_model_len` |" in text
    assert "| `option.n_positions` |  |  | mapped to `max_model_len` |" in text
    assert "`option.output_formatter`" not in text


def test_custom_handlers_have_a_section():
    text = section("Custom handlers")
    assert "- `batch_size` (honoured): Requests that dynamic batching collects" in text
    assert "`option.dtype`" not in text


def test_flags_of_one_option_are_in_one_line():
    text = command_help("serve")
    assert "  -v, --verbose\n      Print every route" in text
    assert "  -c CTX_SIZE\n" in text
    assert re.search(r"^  -a, --alias, --served-model-name MODELNAME$", text, re.MULTILINE)
