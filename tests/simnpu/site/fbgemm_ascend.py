"""What ``import fbgemm_ascend`` finds where this folder is on sys.path: operators for the simulated NPU."""

from tests.simnpu import ascend_operators

ascend_operators.register()
