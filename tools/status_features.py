"""What README's status table is about: one feature a row, and the tests that show it on each device.

A new feature is one more entry here, then `python -m tools.status_matrix --update RESULTS.xml...`.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMNPU = "tests/simnpu/"
GPU = "tests/cuda/test_gpu.py"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row. Tests are files, or prefixes of pytest's node ids, ``tests/a/test_b.py::test_c``; the longest one wins."""

    title: str
    title_zh: str
    cpu: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    npu: tuple[str, ...] = ()


def _distributed(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_{name}" for name in names)


def _checkpoint(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/checkpoint/test_{name}" for name in names)


FEATURES = (
    Feature(
        title="losses, rows and states equal an unlimited table's bit for bit, after every one of 200 steps "
        "(simulated: 30) with evictions at every step, W = 1 and 2 (3 and 4 pairwise)",
        title_zh="损失、行和状态与不限容量的表逐比特一致:200 步(模拟:30 步)中的每一步之后,且每步都有淘汰,"
        "W = 1 和 2(3 和 4 为两两组合)",
        cpu=_distributed("oracle.py"),
        simulated=(f"{SIMNPU}test_oracle.py",),
    ),
    Feature(
        title="the hazards of a cache that is filled ahead, by name, in pipeline and plain loop",
        title_zh="预先填充的缓存的各种隐患,逐一命名,在流水线和普通循环中",
        cpu=_distributed("hazards.py"),
        simulated=(f"{SIMNPU}test_hazards.py",),
        cuda=(f"{GPU}::test_hazards",),
    ),
    Feature(
        title="a batch with more rows than the device tier holds is trained exactly, in passes; counted, warned of "
        "once",
        title_zh="行数超过设备层容量的批次分多趟精确训练;会计数,并警告一次",
        cpu=_distributed("oversized.py"),
        simulated=(f"{SIMNPU}test_oversized.py",),
    ),
    Feature(
        title="a batch beyond quota or host memory, or malformed on one rank, is refused on all ranks with one text, "
        "state untouched",
        title_zh="超出配额或主机内存的批次,或在某个 rank 上格式错误的批次,在所有 rank 上以同一文本被拒绝,状态不变",
        cpu=_distributed("refusal.py", "capacity.py"),
    ),
    Feature(
        title="the train pipeline gives the same bits at depths 1 to 12 and W = 1 to 4, pairwise, with random "
        "delays in every stage, resets, direct calls and switches of iterator and mode in between",
        title_zh="训练流水线在深度 1 到 12、W = 1 到 4(两两组合)上结果逐比特一致,包括每个阶段的随机延迟,"
        "以及其间的重置、直接调用和迭代器、模式切换",
        cpu=_distributed("pipeline_oracle.py", "pipeline_life.py"),
        simulated=(f"{SIMNPU}test_oracle.py::test_pipeline", f"{SIMNPU}test_pipeline_life.py"),
    ),
    Feature(
        title="the stages of batches in flight, run in any order that their dependencies allow (sampled from seeds), "
        "train the same rows; planted faults are found",
        title_zh="在途批次的各阶段按依赖关系允许的任意次序执行(由种子抽样),训练出的行都相同;植入的错误能被发现",
        cpu=("tests/model_check/",),
        simulated=(
            "tests/model_check/test_model_check.py::test_every_order_of_the_streams",
            "tests/model_check/test_mutants.py::test_a_fault_is_found_on_streams",
        ),
    ),
    Feature(
        title="batches in every form of `KeyedJaggedTensor`, variable batch per feature, dims 1 to 2048: the same "
        "bits, or refused by name (simulated: variable batch)",
        title_zh="各种形式的 `KeyedJaggedTensor` 批次、每个特征的可变批大小、维度 1 到 2048:逐比特一致,或指名拒绝"
        "(模拟:可变批大小)",
        cpu=_distributed("kjt_forms.py", "vbe.py"),
        simulated=_distributed("vbe.py::test_variable_batches_on_a_device"),
    ),
    Feature(
        title="a script of TorchRec's with the device as its only difference: pipeline and plain loop give the "
        "same bits",
        title_zh="只有设备不同的 TorchRec 脚本:流水线与普通循环结果逐比特一致",
        cpu=_distributed("nine_steps.py"),
        simulated=_distributed("nine_steps.py::test_nine_steps_on_the_simulated_npu", "nine_steps.py::test_ids_that"),
    ),
    Feature(
        title="the Little Demo learns",
        title_zh="Little Demo 能学习",
        cpu=("tests/examples/test_demo.py",),
        simulated=("tests/examples/test_demo.py::test_simulated_npu",),
    ),
    Feature(
        title="a dense part in bfloat16 leaves rows exact; a `GradScaler` is refused by name",
        title_zh="稠密部分使用 bfloat16 时行保持精确;`GradScaler` 被指名拒绝",
        cpu=_distributed("mixed_precision.py"),
        simulated=_distributed("mixed_precision.py::test_a_dense_part_in_bfloat16_leaves_rows_exact_on_a_device"),
    ),
    Feature(
        title="ranks with different numbers of batches end together; a rank that was killed or stopped is named, with "
        "the stage, within 30 s",
        title_zh="批次数不同的各 rank 一同结束;被杀死或停住的 rank 在 30 秒内被指名,并给出所在阶段",
        cpu=_distributed("uneven_ranks.py", "dead_ranks.py"),
    ),
    Feature(
        title="rows through pinned staging buffers and streams; a forgotten wait, a missing `record_stream`, an early "
        "reuse of a buffer are found",
        title_zh="行经由锁页暂存缓冲区和流传输;遗漏的等待、缺失的 `record_stream`、过早复用的缓冲区都能被发现",
        cpu=_distributed("staging.py"),
        simulated=(f"{SIMNPU}test_mutants.py", f"{SIMNPU}test_swap_faults.py"),
    ),
    Feature(
        title="plans: both tiers accounted within 5 %, refusals with a table of needs on all ranks",
        title_zh="规划:两层内存的核算误差在 5 % 以内,拒绝时在所有 rank 上给出需求表",
        cpu=_distributed("plan_placement.py", "plan_refusal.py", "plan_trained.py"),
        simulated=_distributed(
            "plan_trained.py::test_less_and_more_than_the_npu",
            "plan_devices.py::test_npu",
            "plan_devices.py::test_plain_table_beyond_the_npu",
            "plan_devices.py::test_a_planner_without_topology",
        ),
    ),
    Feature(
        title="collectives are tried with known values before training; what does not come back as sent is refused",
        title_zh="训练前用已知数值试验集合通信;与发送内容不符时拒绝训练",
        cpu=_distributed("exchange_check.py"),
        simulated=(f"{SIMNPU}test_collective_check.py", f"{SIMNPU}test_self_test.py"),
        cuda=(f"{GPU}::test_streams_copies_and_collectives",),
    ),
    Feature(
        title="two launchers with one rank each train what one with two ranks does",
        title_zh="两个各有一个 rank 的启动器,与一个有两个 rank 的启动器训练结果相同",
        cpu=_distributed("two_nodes.py"),
    ),
    Feature(
        title="a run that was killed goes on from its last snapshot with the same bits; at another number of ranks "
        "with the same rows",
        title_zh="被杀死的训练从最近的快照继续,逐比特一致;换用其他 rank 数时行相同",
        cpu=_checkpoint(
            "accumulation.py",
            "background.py",
            "columns.py",
            "export_rows.py",
            "inspect.py",
            "load_planner.py",
            "many_tables.py",
            "mutants.py",
            "names.py",
            "row_types.py",
            "save_load.py",
            "shared_models.py",
            "sharded_tables.py",
        ),
        simulated=(f"{SIMNPU}test_checkpoint.py",),
    ),
    Feature(
        title="dying ranks, failing disks, signals, torchrun's restarts, two jobs in one folder: no snapshot is lost",
        title_zh="rank 死亡、磁盘故障、信号、torchrun 重启、两个作业共用目录:不丢失任何快照",
        cpu=_checkpoint(
            "dead_savers.py",
            "demo_kills.py",
            "demo_restarts.py",
            "disks.py",
            "faults.py",
            "kill.py",
            "shared_folder.py",
            "signals.py",
        ),
    ),
    Feature(
        title="deltas are, chained, the live table bit for bit; another process follows them; a run resumes from them",
        title_zh="增量快照逐个相连,与运行中的表逐比特一致;另一进程可跟随;训练可从增量恢复",
        cpu=_checkpoint("deltas.py", "delta_resume.py", "follower.py"),
    ),
    Feature(
        title="tables go out and come in by id: Parquet, safetensors, TorchRec's own collections, what RecSDK saved",
        title_zh="表按 ID 导出和导入:Parquet、safetensors、TorchRec 自身的 collection、RecSDK 保存的表",
        cpu=_checkpoint(
            "export.py",
            "import_table.py",
            "plain_collections.py",
            "pretrained.py",
            "recsdk.py",
            "recsdk_refusals.py",
            "safetensors.py",
            "without_torchrec.py",
        ),
    ),
    Feature(
        title="sequences: losses, rows and states equal an unlimited table's bit for bit, with repeated ids sent once "
        "and without",
        title_zh="序列:损失、行和状态与不限容量的表逐比特一致,重复的 ID 只发送一次或逐个发送",
        cpu=_distributed("sequence_oracle.py", "sequences.py", "sequence_mutants.py"),
        simulated=(f"{SIMNPU}test_sequences.py",),
    ),
    Feature(
        title="row-wise, table-wise and column-wise tables in one collection: the same bits; planned, evicted, refused",
        title_zh="同一 collection 中按行、按表、按列分片的表:逐比特一致;规划、淘汰、拒绝",
        cpu=_distributed(
            "sharding_types.py",
            "plan_sharding_types.py",
            "capacity.py::test_shards_of_one_table",
            "capacity.py::test_a_full_table_of_one_rank",
        ),
        simulated=(f"{SIMNPU}test_sharding_types.py",),
    ),
    Feature(
        title="one step for the gradients of several batches equals one batch of all; frozen tables are read, not "
        "stepped",
        title_zh="多个批次梯度的一次更新等于一个合并批次;冻结的表只读不更新",
        cpu=_distributed("accumulation.py", "accumulated_sequences.py", "frozen_tables.py"),
        simulated=(f"{SIMNPU}test_accumulation.py",),
    ),
    Feature(
        title="optimizers of both routes, learning rates and TorchRec's modules, beside TorchRec on the same numbers",
        title_zh="两种途径的优化器、学习率和 TorchRec 的模块,与 TorchRec 在相同数据上对照",
        cpu=(*_distributed("optimizers_beside_torchrec.py"), "tests/conformance/"),
    ),
    Feature(
        title="frozen and quantised tables: evaluation's bits as float32, within the reported error else; traced, "
        "scripted, exported, from C++",
        title_zh="冻结和量化的表:float32 时与评估逐比特一致,否则在所报告的误差之内;可追踪、脚本化、导出,可用于 C++",
        cpu=("tests/inference/",),
    ),
    Feature(
        title="FBGEMM's kernels on the device, after a trial with known values; plain operators where they fail",
        title_zh="设备上的 FBGEMM 内核,先以已知数值试验;失败时由普通算子服务",
        cpu=("tests/unit/kernels/test_device_tables.py",),
        simulated=(f"{SIMNPU}test_ascend_kernels.py",),
        cuda=(f"{GPU}::test_fbgemm_s_kernels",),
    ),
    Feature(
        title="on one device, cached and pipelined: the bits of all rows on the device, unpipelined; nothing waits "
        "and nothing is allocated once warm",
        title_zh="在单个设备上,带缓存和流水线:与所有行在设备上、无流水线时逐比特一致;预热后不等待,不分配",
        simulated=("tests/cuda/test_bodies.py",),
        cuda=(GPU,),
    ),
)
