"""Decodes with OpenVINO GenAI's continuous batching on the CPU: plainly, or with prompt lookup."""

import numpy as np
import openvino
import openvino_genai
import protocol

# The defaults quantise the cache and the activations to 8 bits, which is another model: below fp32
# they stay, since they are what makes it fast there. Modes for many clients end with "f32" where
# they are exact.
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
RUNNING = openvino_genai.GenerationStatus.RUNNING


def open_engine(settings):
    """Opens a GGUF file, or a folder with OpenVINO's own graph."""
    mode, is_alone = settings["mode"], settings["may_end"]
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    if mode.endswith("f32") or (is_alone and settings["precision"] == "fp32"):
        properties |= EXACT
    is_lookup = mode.startswith("lookup")
    if is_lookup:
        properties["prompt_lookup"] = True
    scheduler = openvino_genai.SchedulerConfig()
    # By default it keeps the rows of earlier prompts: a prompt's second round had no prefill.
    scheduler.enable_prefix_caching = False
    if is_alone:  # as its LLMPipeline sets it for one user: a prompt goes in one pass
        scheduler.max_num_batched_tokens = settings["max_length"]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings["model"], scheduler, "CPU", properties
    )

    def answer(prompts, clients, max_new_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = False
        config.ignore_eos = not is_alone
        if is_alone:
            config.stop_token_ids = set(settings["end_ids"])
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
