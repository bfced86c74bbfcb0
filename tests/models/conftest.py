import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
