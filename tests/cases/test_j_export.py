"""Section J, what leaves a training: exports of tables to files, to TorchRec's own collections, to frozen tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrec import ConfigError, HashEmbeddingBagConfig, checkpoint
from hybridrec.checkpoint.safetensors import SafetensorsFile
from hybridrec.config import resolve_table
from hybridrec.inference.frozen_tables import FrozenTable
from hybridrec.inference.row_format import RowFormat
from tests.checkpoint.test_export import EXPORTS, READERS
from tests.checkpoint.test_plain_collections import NUM_ROWS, plain_configs
from tests.checkpoint.test_safetensors import SCENARIO, save_small_chunks
from tests.ranks import RankPools


@pytest.mark.parametrize("kind", EXPORTS)
def test_ter120_ter136_only_hashed_tables_are_trained_saved_and_exported(
    pools: RankPools, tmp_path: Path, kind: str
) -> None:
    """No feature has a table of another kind."""
    saved = pools[2].run(save_small_chunks, SCENARIO, tmp_path / "s")
    files = EXPORTS[kind](tmp_path / "s", tmp_path / "out")
    for table, file in zip(SCENARIO.tables, files, strict=True):
        ids, embeddings = READERS[kind](file)
        expected = {i: record[: 4 * table.dim] for one in saved for i, (record, _) in one[table.name].items()}
        assert len(ids) == len(expected) > 10
        assert dict(zip(ids.tolist(), (row.numpy().tobytes() for row in embeddings), strict=True)) == expected
    rows = {table.name: NUM_ROWS for table in SCENARIO.tables}
    with pytest.raises(ConfigError, match="ids are no rows of a plain table of 60, such as"):  # they are raw hashes
        checkpoint.to_embedding_bag_collection(tmp_path / "s", plain_configs(SCENARIO), num_embeddings=rows)


def test_ter472_rows_beyond_four_gib_of_a_file_are_found(tmp_path: Path) -> None:
    """Nothing is written but the header and the last row: the file has 6 GiB of holes."""
    rows, dim = 3 * 2**23 + 2, 64
    id_bytes, row_bytes = 8 * rows, 4 * dim * rows
    header = {
        "id": {"dtype": "I64", "shape": [rows], "data_offsets": [row_bytes, row_bytes + id_bytes]},
        "embedding": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, row_bytes]},
    }
    text, last = json.dumps(header).encode(), torch.arange(dim, dtype=torch.float32)
    with open(tmp_path / "large", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + row_bytes - 4 * dim)
        file.write(last.numpy().tobytes())
        file.seek(8 + len(text) + row_bytes + id_bytes - 8)
        file.write((-7).to_bytes(8, "little", signed=True))
    large = SafetensorsFile(tmp_path / "large", dim)
    *_, (ids, embeddings) = large.part(2**20, 24, 25)  # the last two rows, and before them ids alone
    assert embeddings is not None
    assert ids.tolist() == [0, -7] and torch.equal(embeddings, torch.stack([torch.zeros(dim), last]))


def test_ter472_rows_beyond_two_gib_of_codes_are_read() -> None:
    """Of a quantised table; pages of zeros that nobody touches take no memory."""
    rows, dim = 2**31 // 2048 + 3, 2048
    codes, ids = np.zeros((rows + 1, dim), dtype=np.uint8), np.arange(rows + 1)
    assert codes.nbytes > 2**31
    codes[rows - 1], ids[rows] = np.arange(dim) % 256, 2**63 - 1
    config = resolve_table(HashEmbeddingBagConfig(rows, dim, "user", feature_names=["u"]))
    table = FrozenTable(
        config,
        RowFormat.INT8,
        ids=torch.from_numpy(ids),
        codes=torch.from_numpy(codes),
        scale_bias=torch.tensor([[2.0, -1.0]]).repeat(rows + 1, 1),
        has_initial_rows=False,
    )
    found = table(torch.tensor([rows - 1, rows - 2]))
    assert torch.equal(found, torch.stack([torch.arange(dim) % 256 * 2.0 - 1, torch.full((dim,), -1.0)]))
