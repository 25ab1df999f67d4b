"""Answers loads of many clients with OpenVINO GenAI's continuous batching on the CPU."""

import numpy as np
import openvino
import openvino_genai
import protocol
from openvino_worker import EXACT

RUNNING = openvino_genai.GenerationStatus.RUNNING


def open_engine(settings):
    """Opens a GGUF file, or a folder with OpenVINO's own graph.

    Modes that end with "f32" compute and keep in float32; all others have OpenVINO's defaults,
    which on many CPUs are bfloat16 for products and 8 bits for the cache.
    """
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    properties |= EXACT if settings["mode"].endswith("f32") else {}
    is_lookup = settings["mode"].startswith("lookup")
    if is_lookup:
        properties["prompt_lookup"] = True
    scheduler = openvino_genai.SchedulerConfig()
    # As in openvino_worker.py; what a pass takes of prompts is left as it is, for many clients.
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings["model"], scheduler, "CPU", properties
    )

    def answer(prompts, clients, max_new_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = False
        config.ignore_eos = True
        if is_lookup:
            config.num_assistant_tokens = settings["lookup_tokens"]
            config.max_ngram_size = settings["lookup_ngram"]
        load = protocol.Load(prompts)
        running = []
        while True:
            while len(running) < clients and (found := load.take()):
                one, ids = found
                inputs = openvino.Tensor(np.array([ids], dtype=np.int64))
                running.append((one, pipeline.add_request(len(load.answers), inputs, config)))
            if not running:
                return load.reply()
            pipeline.step()
            for one, handle in running:
                if handle.can_read():
                    for output in handle.read().values():
                        load.add(one, output.generated_ids)
            running = [each for each in running if each[1].get_status() == RUNNING]

    return openvino_genai.__version__, answer


if __name__ == "__main__":
    protocol.serve(open_engine)
