"""Which process gets which GPU. None is needed to find out."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.processes.gpus import GPUAssignment, use_gpus
from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError


def config(data_parallel: int = 1, num_generators: int = 2, tensor_parallel_size: int = 1) -> RunConfig:
    return load_config(
        "examples/alphabet_sort/cpu.toml",
        [
            ("training.data_parallel", str(data_parallel)),
            ("generation.num_generators", str(num_generators)),
            ("generation.tensor_parallel_size", str(tensor_parallel_size)),
        ],
    )


@pytest.mark.parametrize(
    ("gpus", "settings", "trainer", "generators"),
    [
        ("", {}, "", ["", ""]),
        ("0", {}, "0", ["0", "0"]),
        ("01", {}, "0", ["1", "1"]),
        ("0123", {"data_parallel": 2, "num_generators": 3}, "01", ["2", "3", "2"]),
        ("01234567", {"data_parallel": 4, "tensor_parallel_size": 2}, "0123", ["45", "67"]),
        ("0123", {"data_parallel": 3, "tensor_parallel_size": 2}, "012", ["01", "23"]),
    ],
)
def test_generators_take_what_the_trainer_leaves(gpus, settings, trainer, generators) -> None:
    assignment = GPUAssignment.of(config(**settings), tuple(gpus))
    assert assignment == GPUAssignment(tuple(trainer), tuple(map(tuple, generators)))


@given(
    num_gpus=st.integers(1, 9), trainer=st.integers(1, 4), generators=st.integers(1, 6), size=st.sampled_from([1, 2])
)
def test_ranks_of_one_group_never_share_and_generators_are_spread(num_gpus, trainer, generators, size) -> None:
    settings = config(trainer, generators, size)
    gpus = tuple(f"GPU-{index}" for index in range(num_gpus))
    if max(trainer, size) > num_gpus:
        field = "training.data_parallel" if trainer > num_gpus else "generation.tensor_parallel_size"
        with pytest.raises(ConfigError, match=f"{field}.*set it to {num_gpus} or less"):
            GPUAssignment.of(settings, gpus)
        return
    assignment = GPUAssignment.of(settings, gpus)
    for group, num_ranks in [(assignment.trainer, trainer), *((group, size) for group in assignment.generators)]:
        assert len(group) == len(set(group)) == num_ranks
    users = [sum(gpu in group for group in assignment.generators) for gpu in gpus]
    if num_gpus >= trainer + size:
        assert users[:trainer] == [0] * trainer
        users = users[trainer:]
    assert max(users) - min(users) <= 1


def test_a_process_sees_its_gpus_alone() -> None:
    script = (
        "from titan_rl.actors.processes.gpus import use_gpus, visible_gpus; import os\n"
        "use_gpus(('4', '6'), 1); print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'], visible_gpus())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("4,6 1 ")


def test_without_gpus_the_environment_stays(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "mine")
    use_gpus((), 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "mine"
