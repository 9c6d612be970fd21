"""Sharded publishing on gloo: the shards of all ranks are bitwise identical to a gathered export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.sharded_publish import digest, publish_and_export, publish_models
from e2e.tiny_policy import make_tiny_llama3, make_tiny_moe, make_tiny_qwen3
from e2e.warm import run_world
from safetensors.torch import load_file

LAYOUTS = {
    "FSDP 2": (2, 1, False),
    "TP 2": (1, 2, False),
    "FSDP 2 x TP 2": (2, 2, False),
    "FSDP 2, parameters on the host": (2, 1, True),
}


ALL = ("qwen3", "tied", "llama3", "moe")
VARIANTS = [
    ("FSDP 2 x TP 2", ("qwen3", "llama3"), True),
    ("FSDP 2", ("tied", "moe"), True),
    ("FSDP 2 x TP 2", ("tied", "moe"), False),
    ("FSDP 2", ("qwen3", "llama3"), False),
    ("TP 2", ALL, False),
    ("FSDP 2, parameters on the host", ALL, False),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """(folder, dtype) of Qwen3 with rows not divisible by four, tied Qwen3, Llama and a mixture of experts."""
    folders = [tmp_path_factory.mktemp("model") for _ in range(4)]
    return {
        "qwen3": (str(make_tiny_qwen3(folders[0], vocab_size=130)), "float32"),
        "tied": (str(make_tiny_qwen3(folders[1], tied=True)), "bfloat16"),
        "llama3": (str(make_tiny_llama3(folders[2])), "float32"),
        "moe": (str(make_tiny_moe(folders[3])), "float32"),
    }


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param(layout, names, marks=() if always else in_depth, id=f"{layout}, {' and '.join(names)}")
        for layout, names, always in VARIANTS
    ],
)
def test_published_shards_match_the_export_and_fail_together(
    models: dict[str, tuple[str, str]], layout: str, names: Sequence[str]
) -> None:
    data_parallel, tensor_parallel, offload = LAYOUTS[layout]
    size = data_parallel * tensor_parallel
    for by_model in run_world(
        publish_models,
        size,
        models=[models[name] for name in names],
        data_parallel=data_parallel,
        tensor_parallel=tensor_parallel,
        offload=["parameters"] if offload else [],
    ):
        for name, found in zip(names, by_model, strict=True):
            # Only Llama's queries and keys are gathered, in two layers.
            assert found["num_gathered"] == (4 if name == "llama3" else 0)
            assert len(found["compared"]) == 3
            for compared in found["compared"]:
                assert compared["wrong"] == []
                assert compared["num_probes"] == [2] + [0] * (size - 1)
                assert compared["probe_error"] < 2e-5, "probes must not be rounded"
                assert len(compared["part_bytes"]) == size
                assert max(compared["part_bytes"]) < 1.4 / size * compared["whole_bytes"]
            twice, no_room = found["failures"]
            assert twice.startswith("trainer rank 0: version 0 is published already")
            assert no_room.startswith("trainer rank 1: no room for version 1")
            assert found["kept"] == [[0], [1, 2]]
            assert found["num_readable"] == compared["num_tensors"]


def test_context_parallel_ranks_publish_and_export_like_one_rank(
    models: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    folder, _ = models["qwen3"]
    alone = publish_and_export(folder, tmp_path / "one")
    assert alone == [digest(load_file(Path(folder) / "model.safetensors"))] * 2
    assert run_world(publish_and_export, 2, folder=folder, out=tmp_path / "two", context_parallel=2) == [alone, alone]
