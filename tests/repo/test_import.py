"""`import hybridrec` is light, and every public name can be had."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hybridrec

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "numpy", "device_backends", "hybridrec._native")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = "import hybridrec, json, sys; dir(hybridrec); hybridrec.__all__; hybridrec.ConfigError; {}"
    loaded = json.loads(run_python(code.format("print(json.dumps(sorted(sys.modules)))")))
    assert "hybridrec" in loaded and "hybridrec.errors" in loaded
    assert set(HEAVY).intersection(loaded) == set()
    # The check can fail: the first name that needs torch loads it.
    loaded = json.loads(run_python(code.format("hybridrec.HashEmbeddingBagConfig; print(json.dumps([*sys.modules]))")))
    assert "torch" in loaded


@pytest.mark.parametrize("name", hybridrec.__all__)
def test_public_name_resolves_once(name: str) -> None:
    value = getattr(hybridrec, name)
    assert value is getattr(hybridrec, name)
    assert name in dir(hybridrec)
    if isinstance(value, type):
        assert value.__name__ == name


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'hybridrec' has no attribute 'HashEmbedingBag'"):
        hybridrec.HashEmbedingBag  # noqa: B018


def test_importing_public_names_changes_no_global_setting() -> None:
    code = (
        "import os, torch, logging, warnings\n"
        "def state():\n"
        "    return dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), list(warnings.filters),"
        " logging.getLogger().level, torch.initial_seed()\n"
        "import torchrec, torchrec.distributed, torchrec.distributed.planner\n"
        "before = state()\n"
        "import hybridrec\n"
        "[getattr(hybridrec, name) for name in hybridrec.__all__]\n"
        "print(state() == before)\n"
    )
    assert run_python(code).strip() == "True"
