"""Keys of the Stable Diffusion handler: known, so that they are refused by name."""

from lmi_core.config.table.option import Option, refused
from lmi_core.config.table.value_type import Int

_REFUSED = refused("this server generates text; serve images with another")


def _image(name: str, doc: str, default: int) -> Option:
    return Option(
        key=f"option.{name}",
        type=Int(1),
        doc=doc,
        systems=("stable_diffusion",),
        default=default,
        actions={"lmi": _REFUSED},
    )


OPTIONS = (
    _image("height", "Height of an image in pixels.", 512),
    _image("width", "Width of an image in pixels.", 512),
    _image("num_images_per_prompt", "Images per prompt.", 1),
)
