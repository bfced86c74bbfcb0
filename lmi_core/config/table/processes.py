"""Keys of the processes that run a model's own code (DJL-Serving's PyEnv.java)."""

from lmi_core.config.table.option import Option, honoured, no_effect, refused
from lmi_core.config.table.value_type import Bool, Int, Items, Text

_COMMON = ("common",)


OPTIONS = (
    Option(
        key="option.handler",
        type=Text("function name"),
        doc="Function of model.py that answers requests.",
        systems=_COMMON,
        default="handle",
        actions={
            "lmi": refused(
                "the model's directory has no model.py that defines it", idle=("handle",)
            )
        },
    ),
    Option(
        key="option.enable_venv",
        type=Bool(),
        doc="A virtual environment per model for requirements.txt.",
        systems=_COMMON,
        default=False,
        actions={
            "lmi": no_effect("requirements.txt always goes to a directory of its own per model")
        },
    ),
    Option(
        key="option.pythonExecutable",
        type=Text("path"),
        doc="Python interpreter of the handler process.",
        systems=_COMMON,
        default="python",
        env=("PYTHON_EXECUTABLE",),
        actions={"lmi": no_effect("the engine and its copies run in the server's interpreter")},
    ),
    Option(
        key="option.env",
        type=Items(Text("NAME=value")),
        doc="Variables exported to the handler process.",
        systems=_COMMON,
        actions={"lmi": no_effect("there is no handler process; set variables of the server")},
    ),
    Option(
        key="option.handler_environment",
        type=Items(Text("name of a variable")),
        doc="Variables with secrets of the server that the handler process gets nevertheless.",
        systems=_COMMON,
        actions={"lmi": no_effect("there is no handler process")},
    ),
    Option(
        key="option.max_output_size",
        type=Int(1),
        doc="Largest answer of a handler in bytes.",
        systems=_COMMON,
        default=62914560,
        actions={"lmi": no_effect("answers are bounded by max_new_tokens")},
    ),
    Option(
        key="option.modelName",
        type=Text("name"),
        doc="Name the model is served under.",
        systems=_COMMON,
        actions={
            "lmi": honoured(
                "served_model_name",
                test="tests/cli/test_options.py::test_name_log_and_size",
            )
        },
    ),
)
