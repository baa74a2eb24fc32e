"""When the environment is made anew, when only the core is rebuilt, and when nothing is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env


class Checkout:
    """A checkout in a temporary folder whose pip only writes down what it was asked for."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.calls = root, list[tuple[str, ...]]()
        self.native = root / "hybridrec" / "native"
        for folder in ("include", "src"):
            (self.native / folder).mkdir(parents=True)
        (self.native / "CMakeLists.txt").write_text("project(x)")
        (self.native / "include" / "id_map.h").write_text("// map")
        (root / "pyproject.toml").write_text('[build-system]\nrequires = ["builder==1"]\n')
        (root / "stand_in").mkdir()
        (root / "stand_in" / "pyproject.toml").write_text("[project]\n")
        (root / ".venv" / "bin").mkdir(parents=True)
        (root / ".venv" / "bin" / "python").write_text("")
        for name, value in {
            "ROOT": root,
            "NATIVE": self.native,
            "STAND_IN": root / "stand_in",
            "has_same_python": lambda stack: True,
            "check_core": lambda stack: None,
            "pip": lambda stack, *arguments: self.calls.append(arguments),
        }.items():
            monkeypatch.setattr(setup_env, name, value)

    def refresh(self, stack: str = "cpu") -> list[tuple[str, ...]]:
        self.calls.clear()
        setup_env.refresh(stack)
        return list(self.calls)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path, monkeypatch)


def test_first_run_installs_the_build_tools_then_everything(checkout: Checkout) -> None:
    tools, everything = checkout.refresh()
    assert tools == ("install", "builder==1")
    assert everything[:2] == ("install", "--no-build-isolation") and "--no-deps" not in everything
    assert str(checkout.root / "stand_in") in everything
    assert everything[-2:] == ("-e", f"{checkout.root}[cpu,demo,test,dev]")


def test_second_run_does_nothing(checkout: Checkout) -> None:
    assert checkout.refresh()
    assert checkout.refresh() == []


def test_an_edited_core_is_rebuilt_without_asking_for_packages(checkout: Checkout) -> None:
    checkout.refresh()
    (checkout.native / "src" / "new.cpp").write_text("int x;")
    assert checkout.refresh() == [("install", "--no-build-isolation", "--no-deps", "-e", str(checkout.root))]
    assert checkout.refresh() == []


def test_a_new_module_is_made_known_but_an_edited_one_is_left_alone(checkout: Checkout) -> None:
    module = checkout.root / "hybridrec" / "new.py"
    checkout.refresh()
    module.write_text("x = 1")
    assert len(checkout.refresh()) == 1
    module.write_text("x = 2")
    assert checkout.refresh() == []
    module.unlink()
    assert len(checkout.refresh()) == 1


def test_changed_pins_and_another_stack_install_anew(checkout: Checkout) -> None:
    checkout.refresh()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# another pin\n")
    assert len(checkout.refresh()) == 2
    _, everything = checkout.refresh("cuda")
    assert str(checkout.root / "stand_in") not in everything  # there the real fbgemm-gpu is wanted
    assert everything[-1].endswith("[cuda,demo,test,dev]")


def test_the_npu_stack_without_an_npu_has_an_environment_of_its_own(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write('[project.optional-dependencies]\nnpu = ["torch==2", "torch-npu==2.post1", "fbgemm-ascend==1"]\n')
    folder = checkout.root / ".venv-npu-stack"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\necho 2.0+cu1\n")  # asked for torch's version, it names a CUDA build
    python.chmod(0o755)
    said: list[str] = []
    monkeypatch.setattr(setup_env, "say", said.append)
    checkout.refresh()
    tools, everything, need_cann = checkout.refresh("npu-stack")
    assert "wheel" in tools
    assert "torch==2" in everything and not any("torch-npu" in a or "ascend" in a for a in everything)
    assert need_cann[1:] == (
        "--no-deps",
        "--target",
        str(folder / "device_wheels"),
        "torch-npu==2.post1",
        "fbgemm-ascend==1",
    )
    assert any("torch 2.0+cu1 is a CUDA build" in text for text in said)
    assert checkout.refresh("npu-stack") == [] == checkout.refresh()  # neither has undone the other


def test_a_compiler_that_appears_rebuilds(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "find_compiler", lambda: None)
    checkout.refresh()
    monkeypatch.setattr(setup_env, "find_compiler", lambda: "c++")
    assert len(checkout.refresh()) == 1


def test_a_failed_installation_is_tried_again(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: str) -> None:
        setup_env.fail("pip failed")

    checkout.refresh()
    (checkout.root / "pyproject.toml").write_text('[build-system]\nrequires = ["builder==2"]\n')
    working = setup_env.pip
    monkeypatch.setattr(setup_env, "pip", broken)
    with pytest.raises(SystemExit):
        checkout.refresh()
    monkeypatch.setattr(setup_env, "pip", working)
    assert checkout.refresh()[0] == ("install", "builder==2")


def test_a_half_written_stamp_counts_as_none(checkout: Checkout) -> None:
    checkout.refresh()
    setup_env.stamp_of("cpu").write_text("{")
    assert len(checkout.refresh()) == 2


def test_hashes_keep_parts_apart() -> None:
    assert setup_env.hash_of([b"ab", b"c"]) != setup_env.hash_of([b"a", b"bc"])


@pytest.mark.parametrize(
    ("python", "message"),
    [("/nonexistent/python", "cannot be started"), (sys.executable, None)],
    ids=["missing", "this one"],
)
def test_an_environment_that_is_brought_is_checked_and_left_alone(python: str, message: str | None) -> None:
    env = {**os.environ, "HYBRIDREC_PYTHON": python}
    command = [sys.executable, setup_env.__file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    if message is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1 and message in done.stderr
