"""From a model to an engine, in the order of the real ``build``."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

from tensorrt_llm import __version__
from tensorrt_llm.bindings import KVCacheType
from tensorrt_llm.graph_rewriting import optimize
from tensorrt_llm.network import Network, net_guard
from tensorrt_llm.plugin import PluginConfig
from tensorrt_llm.trt import CAPABILITY, TENSORRT, trt


@dataclass
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: KVCacheType | None = None
    gather_context_logits: bool = False
    max_draft_len: int = 0
    draft_tokens_external: bool = False
    lora_target_modules: list[str] = field(default_factory=list)
    plugin_config: PluginConfig = field(default_factory=PluginConfig)
    dry_run: bool = False

    def update_kv_cache_type(self, architecture):
        """Only two architectures of the real package keep paged_state."""
        assert architecture not in ("MambaForCausalLM", "RecurrentGemmaForCausalLM")
        self.kv_cache_type = self.kv_cache_type or KVCacheType.PAGED
        self.plugin_config.paged_kv_cache = self.kv_cache_type == KVCacheType.PAGED
        self.plugin_config.paged_state = False

    def to_dict(self):
        output = copy.deepcopy(self.__dict__)
        return output | {"kv_cache_type": self.kv_cache_type.name, "plugin_config": self.plugin_config.to_dict()}


class Engine:
    def __init__(self, config, build_config, engine, network):
        self.config, self.build_config, self.engine, self.network = config, build_config, engine, network

    def save(self, engine_dir):
        folder, rank = Path(engine_dir), self.config.mapping.rank
        folder.mkdir(exist_ok=True)
        if rank == 0:
            described = {
                "version": __version__,
                "pretrained_config": self.config.to_dict(),
                "build_config": self.build_config.to_dict(),
            }
            (folder / "config.json").write_text(json.dumps(described, indent=4))
        if self.engine is not None:
            (folder / f"rank{rank}.engine").write_bytes(self.engine)


def build(model, build_config):
    build_config = copy.deepcopy(build_config)
    build_config.plugin_config.dtype = model.config.dtype
    build_config.update_kv_cache_type(model.config.architecture)
    if build_config.max_seq_len is None:
        build_config.max_seq_len = model.config.max_position_embeddings or 2048
    build_config.max_input_len = min(build_config.max_input_len, build_config.max_seq_len)
    build_config.max_num_tokens = min(
        build_config.max_num_tokens, build_config.max_seq_len * build_config.max_batch_size
    )
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = Network(TENSORRT.create_network(builder))
    network.plugin_config = build_config.plugin_config
    if model.config.mapping.world_size > 1:
        network.plugin_config.nccl_plugin = model.config.dtype
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(
            max_batch_size=build_config.max_batch_size,
            max_input_len=build_config.max_input_len,
            max_seq_len=build_config.max_seq_len,
            use_cache=build_config.kv_cache_type != KVCacheType.DISABLED,
            max_beam_width=build_config.max_beam_width,
            max_num_tokens=build_config.max_num_tokens,
            opt_num_tokens=build_config.opt_num_tokens,
            prompt_embedding_table_size=build_config.max_prompt_embedding_table_size,
            max_draft_len=build_config.max_draft_len,
            speculative_decoding_draft_tokens_external=build_config.draft_tokens_external,
            gather_context_logits=build_config.gather_context_logits,
            lora_target_modules=build_config.lora_target_modules,
        )
        model(**inputs)
    optimize(network)
    engine = None if build_config.dry_run else build_engine(builder, network)
    return Engine(model.config, build_config, engine, network)


def build_engine(builder, network):
    config = builder.create_builder_config()
    TENSORRT.set_capability(config, CAPABILITY)
    inputs = network._inputs
    (profiles,) = {len(tensor.profiles) for tensor in inputs.values()}
    for i in range(profiles):
        check_named_dimensions(inputs, i)
        profile = builder.create_optimization_profile()
        for name, tensor in inputs.items():
            ranges = tensor.profiles[i]
            profile.set_shape(name, ranges.min, ranges.opt, ranges.max)
        config.add_optimization_profile(profile)
    for name, parameter in network.named_parameters:
        assert parameter._get_weights(network) is None, f"{name} became a constant of TensorRT-LLM"
    engine = builder.build_serialized_network(network.trt_network, config)
    assert engine is not None, "Engine building failed, please check the error log."
    return bytes(engine)


def check_named_dimensions(inputs, profile):
    """Axes of one name must have one range."""
    seen = {}
    for name, tensor in inputs.items():
        ranges = tensor.profiles[profile]
        for axis, dimension in enumerate(ranges.dimension_names):
            found = (ranges.min[axis], ranges.opt[axis], ranges.max[axis])
            assert seen.setdefault(dimension, found) == found, (
                f"{name}: axis {dimension} is {found} and {seen[dimension]}"
            )
