"""An FBGEMM whose internals moved is named, symbol and version."""

from __future__ import annotations

import pytest

from hybridrec._compat import fbgemm
from hybridrec.errors import BackendError


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(BackendError, match=r"fbgemm-gpu.* \d.*: math.no_such cannot be imported.*tested with FBGEMM 1"):
        fbgemm._symbol("math", "no_such")
    with pytest.raises(BackendError, match="fbgemm_gpu.no_such_module.x cannot be imported"):
        fbgemm._symbol("fbgemm_gpu.no_such_module", "x")


def test_a_missing_parameter_or_attribute_is_named() -> None:
    with pytest.raises(BackendError, match=r"forward\(\) has no parameter 'offsets'"):
        fbgemm._require_parameters("forward()", lambda indices: None, ("indices", "offsets"))
    with pytest.raises(BackendError, match="PoolingMode has no 'MEDIAN'"):
        fbgemm._require_attributes("PoolingMode", fbgemm.PoolingMode, ("SUM", "MEDIAN"))
