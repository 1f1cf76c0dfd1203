"""``trtllm-build`` with the options that the tests give. The real one asks torch for GPUs, one for each worker."""

import argparse
import copy
import importlib.util
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tensorrt_llm.builder import BuildConfig, build
from tensorrt_llm.models import MODEL_MAP, PretrainedConfig


def build_and_save(rank, ckpt_dir, build_config, output_dir, model_config, model_cls):
    rank_config = copy.deepcopy(model_config)
    rank_config.set_rank(rank)
    if model_cls is None:
        model_cls = MODEL_MAP[rank_config.architecture]
    build(model_cls.from_checkpoint(ckpt_dir, config=rank_config), build_config).save(output_dir)


def main():
    parser = argparse.ArgumentParser()
    for name in ("checkpoint_dir", "output_dir", "model_cls_file", "model_cls_name"):
        parser.add_argument(f"--{name}")
    for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len", "workers"):
        parser.add_argument(f"--{name}", type=int)
    args = vars(parser.parse_args())
    model_cls = None
    if args["model_cls_file"] is not None:
        spec = importlib.util.spec_from_file_location("models", args["model_cls_file"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model_cls = getattr(module, args["model_cls_name"])
    config = PretrainedConfig.from_json_file(Path(args["checkpoint_dir"]) / "config.json")
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len")
    build_config = BuildConfig(**{name: args[name] for name in names if args[name] is not None})
    calls = [
        (rank, args["checkpoint_dir"], build_config, args["output_dir"], config, model_cls)
        for rank in range(config.mapping.world_size)
    ]
    if (args["workers"] or 1) == 1:
        for call in calls:
            build_and_save(*call)
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=args["workers"]) as pool:
        for future in as_completed([pool.submit(build_and_save, *call) for call in calls]):
            future.result()


if __name__ == "__main__":
    main()
