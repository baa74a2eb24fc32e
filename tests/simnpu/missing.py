"""Operators that the libraries of a real NPU lack: refused here, since a silent copy through the host would hide there.

torch-npu runs an operator without a kernel on the CPU, with copies both ways and one warning. Of FBGEMM's operators the
device has those that fbgemm-ascend registers for Atlas A2 and A3. Sources: torch-npu 2.13 and fbgemm-ascend 1.5, their
registrations listed over a stub of CANN.
"""

from __future__ import annotations

import re

_ATEN = {
    "aten::_embedding_bag_backward",
    "aten::_embedding_bag_dense_backward",
    "aten::_embedding_bag_per_sample_weights_backward",
    "aten::segment_reduce",
    "aten::_fused_adagrad_",
    "aten::__lshift__",
    "aten::bitwise_left_shift",
}
_FBGEMM = re.compile(
    r"fbgemm::(asynchronous_(complete|inclusive|exclusive)_cumsum|offsets_range|segment_sum_csr"
    r"|permute_(1D|2D)_sparse_data(_input1D)?|permute_sparse_data|permute_pooled_embs\w*|merge_pooled_embeddings"
    r"|all_to_one_device|dense_to_jagged\w*|jagged_(1d|2d)_to_dense|jagged_to_padded_dense\w*"
    r"|jagged_dense_elementwise_(add|mul)\w*|stacked_jagged_\w+|dense_embedding_codegen_lookup_function(_grad)?"
    r"|split_embedding_codegen_lookup_(sgd|adagrad|rowwise_adagrad)_function(_pt2)?)"
)


def refuse_missing(name: str) -> None:
    """
    Raises:
        NotImplementedError: A real NPU has no kernel of the operator ``name``, such as "aten::segment_reduce".
    """
    is_missing = name in _ATEN or (name.startswith("fbgemm::") and _FBGEMM.fullmatch(name) is None)
    if is_missing:
        library = "fbgemm-ascend" if name.startswith("fbgemm::") else "torch-npu"
        raise NotImplementedError(
            f"{name}: {library} has no kernel of it for the NPU, where it would run on the CPU without a word. Use "
            "operators that the device has, or move the tensors to the host by name."
        )
