"""Which cores the tests of this folder run on."""

from __future__ import annotations

import pytest

from hybridrec.native import has_compiled_core
from hybridrec.native.core import CoreName

CORES = ["reference", *(["compiled"] if has_compiled_core() else [])]


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> CoreName:
    """Every core that is there."""
    name: CoreName = request.param
    return name
