"""Decodes with OpenVINO GenAI on the CPU: plainly, or with prompt lookup."""

import numpy as np
import openvino
import openvino_genai
import protocol

# The defaults quantise the cache and the activations to 8 bits, which is another model: below fp32
# they stay, since they are what makes it fast there.
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


class Streamer(openvino_genai.StreamerBase):
    """Takes the time of the first tokens."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def write(self, tokens):
        self.watch.tick(len(tokens) if isinstance(tokens, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


def open_engine(settings):
    """Opens a GGUF file, or a folder with OpenVINO's own graph."""
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    properties |= EXACT if settings["precision"] == "fp32" else {}
    scheduler = openvino_genai.SchedulerConfig()
    # By default it keeps the rows of earlier prompts: a prompt's second round had no prefill.
    scheduler.enable_prefix_caching = False
    # As LLMPipeline sets it for one user: a prompt goes in one pass.
    scheduler.max_num_batched_tokens = settings["max_length"]
    properties["scheduler_config"] = scheduler
    is_lookup = settings["mode"] == "lookup"
    if is_lookup:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", **properties)

    def generate(ids, max_new_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = False
        config.stop_token_ids = set(settings["end_ids"])
        if is_lookup:
            config.num_assistant_tokens = settings["lookup_tokens"]
            config.max_ngram_size = settings["lookup_ngram"]
        watch = protocol.Watch()
        inputs = openvino.Tensor(np.array([ids], dtype=np.int64))
        result = pipeline.generate(inputs, config, Streamer(watch))
        return watch.reply(result.tokens[0])

    return openvino_genai.__version__, generate


if __name__ == "__main__":
    protocol.serve(open_engine)
