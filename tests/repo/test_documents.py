"""The texts name commands, files and code that exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, repository_files

DOCUMENTS = [path for path in repository_files(suffixes=(".md",)) if "data" not in path.parts]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
LANGUAGES = [
    ("README.md", "README.zh.md"),
    ("docs/npu.md", "docs/zh/npu.md"),
    ("docs/migrating_from_recsdk.md", "docs/zh/migrating_from_recsdk.md"),
]
NOTHING = ("not yet", "not needed", "TorchRec's own")
RECSDK = """
    MAX_NUM_EMBEDDINGS MAX_EMBEDDINGS_DIM EMBEDDINGS_DIM_ALIGNMENT MAX_NUM_TABLES MAX_MULTI_HOT_SIZE MAX_BATCH_SIZE
    MAX_WORLD_SIZE MAX_CACHINE_MEM_SIZE MAX_PIPE_N_BATCH MAX_LOCAL_UNIQUE_PARALLEL_BATCH_NUM MIN_EVICT_STEP_INTERVAL
    HashEmbeddingBagConfig HashEmbeddingBagCollection HashEmbeddingBagCollection.device
    HashEmbeddingBagCollection.is_weighted HashEmbeddingBagCollection.embedding_bag_configs
    HashEmbeddingBagCollection.forward HashEmbeddingBagCollection.reset_parameters HashEmbeddingBag HashTableOption
    EvictStrategy get_default_hybrid_sharders HybridEmbeddingBagCollectionSharder
    HybridHashEmbeddingBagCollectionSharder HybridTrainPipelineSparseDist HybridTrainPipelineSparseDist.progress
    EmbCacheEmbeddingBagConfig EmbCacheEmbeddingConfig InitializerType.LINEAR InitializerType.TRUNCATED_NORMAL
    InitializerType.UNIFORM EmbCacheEmbeddingBagCollection EmbCacheEmbeddingCollection
    EmbCacheEmbeddingBagCollectionSharder EmbCacheEmbeddingCollectionSharder EmbCacheTrainPipelineSparseDist
    EmbCacheTrainPipelineContext EmbCacheTrainPipelineSparseDist.wait_pipeline_compute_swapinfo AdmitAndEvictConfig
    AdmitAndEvictPolicyType ShowClickParams JaggedTensorWithTimestamp KeyedJaggedTensorWithTimestamp
    KeyedJaggedTensorWithCount KeyedJaggedTensorWithLookHelper Saver.save Saver.load Saver.get_latest_load_path
    IdsMapper torch.ops.hybrid.block_bucketize_sparse_features_cpu ModelConverter ShardingEnv Topology
    ParameterConstraints EmbeddingShardingPlanner DistributedModelParallel JaggedTensor KeyedJaggedTensor
    apply_optimizer_in_backward AccumulateAdagrad AccumulateAdam AccumulateSGD DynamicEmbParameterConstraints
    DynamicEmbTableOptions DynamicEmbeddingCollectionSharder DynamicEmbeddingBagCollectionSharder DynamicEmbDump
    DynamicEmbLoad incremental_dump get_score set_score
""".split()
"""The public names of RecSDK's Torch line; members where a script names them."""
MAKE_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return [text for name, text in BLOCK.findall(path.read_text()) if name == language]


def make_targets() -> set[str]:
    """What `make` can be asked for."""
    return set(MAKE_TARGET.findall((ROOT / "Makefile").read_text()))


def test_first_block_of_the_readme_is_the_two_commands() -> None:
    first = BLOCK.search((ROOT / "README.md").read_text())
    assert first is not None and first[1] == "bash"
    commands = [line.partition("#")[0].strip() for line in first[2].splitlines()]
    assert commands == ["make demo", "make test"]


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_table_of_stacks_has_the_pins_of_pyproject(readme: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / readme).read_text()
    for stack in ("cpu", "cuda", "npu"):
        (row,) = re.findall(rf"^\| `{stack}` \|.*$", text, re.MULTILINE)
        versions = {pin.partition("==")[2] for pin in extras[stack] if "==" in pin}
        assert set(re.findall(r"\d+\.\d+\.[\w.]+", row)) == versions


def test_every_make_command_in_the_documents_exists() -> None:
    targets = make_targets()
    assert {"demo", "test", "slow", "lint", "bench", "clean", "help"} <= targets
    named = {
        (path.name, target)
        for path in DOCUMENTS
        for text in [path.read_text()]
        for target in re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE)
    }
    assert ("README.md", "demo") in named
    assert {entry for entry in named if entry[1] not in targets} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    local = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_compile_and_import_what_exists(path: Path) -> None:
    for block in blocks(path, "python"):
        compile(block, str(path), "exec")
        imports = re.findall(r"^from hybridrec[\w.]* import .*$", block, re.MULTILINE)
        names: dict[str, object] = {}
        exec("\n".join(line for line in imports if "(" not in line), names)
        assert all(value is not None for value in names.values())


@pytest.mark.parametrize(("english", "chinese"), LANGUAGES)
def test_both_languages_have_the_same_headings_and_code(english: str, chinese: str) -> None:
    ours, theirs = ((ROOT / name).read_text() for name in (english, chinese))
    assert len(BLOCK.findall(ours)) >= 3
    assert BLOCK.findall(theirs) == BLOCK.findall(ours)
    headings = [HEADING.findall(BLOCK.sub("", text)) for text in (ours, theirs)]
    assert len(headings[0]) >= 6 and headings[0] == headings[1]


def migration_table(page: str) -> list[tuple[str, str]]:
    """(names of RecSDK, what takes their place), as the rows of the page say."""
    section = (ROOT / page).read_text().partition("| RecSDK |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines()[2:]]
    return [(row[0], row[1]) for row in rows]


def test_every_name_of_recsdk_is_mapped_to_one_that_exists_or_to_none() -> None:
    mapped: list[str] = []
    for names, place in migration_table("docs/npu.md"):
        mapped += re.findall(r"`([^`]+)`", names)
        if place not in NOTHING:
            (ours,) = re.findall(r"^`(hybridrec\.[\w.]+)`$", place)
            assert resolve(ours) is not None
    assert sorted(mapped) == sorted(RECSDK)


def resolve(dotted: str) -> object:
    """What a dotted name stands for: a module as far as there is one, then attributes."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            value = getattr(value, attribute)
        return value
    raise ModuleNotFoundError(dotted)


def test_the_chinese_table_maps_the_same_names_to_the_same() -> None:
    english, chinese = migration_table("docs/npu.md"), migration_table("docs/zh/npu.md")
    words = dict(zip(NOTHING, ("尚无", "不需要", "TorchRec 自带"), strict=True))
    assert chinese == [(names, words.get(place, place)) for names, place in english]


def test_after_the_one_substitution_a_script_of_recsdk_finds_what_it_imports() -> None:
    script = """
from hybrid_torchrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from hybrid_torchrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybrid_torchrec.distributed.sharding_plan import get_default_hybrid_sharders
"""
    (command,) = re.findall(r"^sed -i 's/(.*)/g' train.py$", (ROOT / "docs/npu.md").read_text(), re.MULTILINE)
    pattern, _, replacement = command.rpartition("/")
    names: dict[str, object] = {}
    exec(re.sub(pattern, replacement, script), names)
    assert names["HashEmbeddingBagCollection"] is resolve("hybridrec.HashEmbeddingBagCollection")
