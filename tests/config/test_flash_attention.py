"""Who may use flash-attn: what is written, else what users of the system know."""

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from tests.checkpoints import cached_checkpoint


@pytest.mark.parametrize(
    ("written", "is_allowed"),
    [
        ("", True),
        ("option.disable_flash_attn=false\n", True),
        ("option.disable_flash_attn=true\n", False),
        ("engine=Python\noption.rolling_batch=scheduler\n", False),
        ("engine=Python\noption.rolling_batch=scheduler\noption.disable_flash_attn=false\n", True),
    ],
)
def test_allowed_and_not(tmp_path, written, is_allowed):
    for path in cached_checkpoint("llama2", dtype="bfloat16").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "serving.properties").write_text(f"option.device=cuda\n{written}")
    deployment = resolve([str(tmp_path), "--prefer-native"], {}, Host(num_gpus=1))
    assert deployment.models[0].engine_config(tmp_path).flash_attention is is_allowed
