"""What reads snapshots without a model needs torch and numpy alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from hybridrec import checkpoint

HIDDEN = ("torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "torch_npu", "device_backends")
HIDE = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HIDDEN}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)


def test_readers_come_without_torchrec() -> None:
    done = run(
        "from hybridrec import checkpoint; import hybridrec.checkpoint.__main__\n"
        "checkpoint.follow, checkpoint.latest, checkpoint.export_safetensors, checkpoint.read_recsdk"
    )
    assert done.returncode == 0, done.stderr
    assert "ModuleNotFoundError: torchrec" in run("from hybridrec.checkpoint import load").stderr


@pytest.mark.parametrize("name", checkpoint.__all__)
def test_every_name_can_be_had(name: str) -> None:
    """A module of the same name would be had in its place."""
    assert callable(getattr(checkpoint, name)) and name in dir(checkpoint)
    assert name not in [module.name for module in pkgutil.iter_modules(checkpoint.__path__)]


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'hybridrec.checkpoint' has no attribute 'saves'"):
        checkpoint.saves  # noqa: B018
