"""Configs and models, and how a checkpoint is loaded."""

import copy
import json
from pathlib import Path

from safetensors.torch import load_file

from tensorrt_llm.bindings import KVCacheType
from tensorrt_llm.functional import PositionEmbeddingType
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.generation_mixin import GenerationMixin
from tensorrt_llm.module import Module
from tensorrt_llm.plugin import init_all_reduce_helper

__all__ = ["KVCacheType", "PretrainedConfig", "PretrainedModel", "QuantConfig"]

#: What the real logger would say.
WARNINGS: list[str] = []


class QuantConfig:
    def __init__(self, quant_algo=None, kv_cache_quant_algo=None):
        self.quant_algo, self.kv_cache_quant_algo = quant_algo, kv_cache_quant_algo

    def to_dict(self):
        return dict(vars(self))


class PretrainedConfig:
    def __init__(
        self,
        *,
        architecture,
        dtype,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        vocab_size=None,
        hidden_act="gelu",
        logits_dtype="float32",
        norm_epsilon=1e-5,
        position_embedding_type=PositionEmbeddingType.learned_absolute,
        max_position_embeddings=None,
        rotary_embedding_dim=None,
        num_key_value_heads=None,
        intermediate_size=None,
        mapping=None,
        quantization=None,
        use_parallel_embedding=False,
        embedding_sharding_dim=0,
        head_size=None,
        qk_layernorm=False,
        runtime_defaults=None,
        **kwargs,
    ):
        self.architecture, self.dtype, self.logits_dtype = architecture, dtype, logits_dtype
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.hidden_act, self.norm_epsilon = num_attention_heads, hidden_act, norm_epsilon
        self.runtime_defaults = runtime_defaults
        if isinstance(position_embedding_type, str):
            position_embedding_type = PositionEmbeddingType.from_string(position_embedding_type)
        self.position_embedding_type, self.max_position_embeddings = position_embedding_type, max_position_embeddings
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.intermediate_size = hidden_size * 4 if intermediate_size is None else intermediate_size
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping or {})
        self.quantization = quantization if isinstance(quantization, QuantConfig) else QuantConfig(**quantization or {})
        self.use_parallel_embedding, self.embedding_sharding_dim = use_parallel_embedding, embedding_sharding_dim
        self.head_size = hidden_size // num_attention_heads if head_size is None else head_size
        self.qk_layernorm = qk_layernorm
        self.rotary_embedding_dim = self.head_size if rotary_embedding_dim is None else rotary_embedding_dim
        for key, value in kwargs.items():
            setattr(self, key, value)
            WARNINGS.append(f"Implicitly setting {type(self).__name__}.{key} = {value}")

    @property
    def kv_dtype(self):
        return self.dtype

    @classmethod
    def from_dict(cls, config):
        from tensorrt_llm.models import MODEL_MAP

        model_cls = MODEL_MAP[config["architecture"]]
        return getattr(model_cls, "config_class", cls)(**config)

    @classmethod
    def from_json_file(cls, path):
        return cls.from_dict(json.loads(Path(path).read_text()))

    def to_dict(self):
        output = copy.deepcopy(self.__dict__)
        output["position_embedding_type"] = str(self.position_embedding_type)
        output["mapping"] = self.mapping.to_dict()
        output["mapping"].pop("rank")
        output["quantization"] = self.quantization.to_dict()
        return output

    def set_rank(self, rank):
        self.mapping.rank = rank


class PostInitCaller(type):
    def __call__(cls, *args, **kwargs):
        made = type.__call__(cls, *args, **kwargs)
        made.__post_init__()
        return made


class PretrainedModel(Module, GenerationMixin, metaclass=PostInitCaller):
    def __init__(self, config):
        super().__init__()
        init_all_reduce_helper()
        self.config = config

    def __post_init__(self):
        """The real one quantises and fuses layers that it knows; here are none."""
        assert [module for _, module, _ in self.named_modules_with_parent()] == [self]

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None):
        config = config or PretrainedConfig.from_json_file(Path(ckpt_dir) / "config.json")
        if rank is not None:
            config.set_rank(rank)
        path = Path(ckpt_dir) / f"rank{config.mapping.rank}.safetensors"
        assert path.is_file()
        model = cls(config)
        model.load(load_file(path))
        return model

    def load(self, weights):
        required, provided = {name for name, p in self.named_parameters() if not p.is_inited()}, set(weights)
        if not required <= provided:
            raise RuntimeError(f"Required but not provided tensors:{required - provided}")
        if provided - required:
            WARNINGS.append(f"Provided but not required tensors: {provided - required}")
        for name, parameter in self.named_parameters():
            parameter.value = weights[name]
