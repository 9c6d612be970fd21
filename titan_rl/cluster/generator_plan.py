"""What each generator of a run or a server is told."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.cluster.generator_actor import GeneratorSettings
from titan_rl.config.sections import GenerationConfig, StateDictConfig
from titan_rl.generation.engine_spec import EngineSpec
from titan_rl.generation.gpu_share import CPU_KV_GIB
from titan_rl.training.settings import ModelConfig


@dataclass(frozen=True, slots=True)
class GeneratorPlan:
    """
    Attributes:
        seed: of the run.
        version: of the weights in the model's folder.
        max_running: most requests one engine advances at a time.
        sleeps: engines give their memory to a trainer at times.
    """

    model: ModelConfig
    generation: GenerationConfig
    statedict: StateDictConfig
    run_id: str
    seed: int
    version: int
    max_running: int
    sleeps: bool

    def settings_of(
        self, index: int, model_path: str, *, neighbours: int = 0, beside_trainer: bool = False
    ) -> GeneratorSettings:
        """
        Args:
            index: of the generator, from 0.
            model_path: of the model's folder on its host.
            neighbours: other generators on its GPUs.
            beside_trainer: a trainer is on its GPUs, too. What that will take is not known when the engine starts.
        """
        generation = self.generation
        kv_cache_gib = generation.kv_cache_gib
        if kv_cache_gib is None and beside_trainer and generation.gpu_share is None:
            kv_cache_gib = CPU_KV_GIB
        engine = EngineSpec(
            model_path,
            dtype=self.model.dtype,
            max_context=self.model.max_context,
            max_running=self.max_running,
            adapts=generation.max_running == "auto",
            kv_cache_gib=kv_cache_gib,
            gpu_neighbours=neighbours,
            seed=(self.seed + index) % 2**32,  # equal ones would draw equal tokens for siblings on two generators
            routed_experts=generation.return_routed_experts,
            gpu_share=generation.gpu_share,
            prefix_cache=generation.prefix_cache,
            speculative=generation.speculative.options(),
            options=generation.vllm,
            sleeps=self.sleeps,
            tensor_parallel_size=generation.tensor_parallel_size,
            generator=index,
        )
        return GeneratorSettings(engine, generation, self.statedict, self.run_id, self.version)
