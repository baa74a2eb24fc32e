"""Python imports this where the folder is on PYTHONPATH: so `--jitter` reaches all processes that tests start."""

import importlib.util
import sys
from pathlib import Path

# The tests are not on the path yet; they find this very module under its own name later.
_spec = importlib.util.spec_from_file_location("tests.jitter.delays", Path(__file__).with_name("delays.py"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
_module.install()
