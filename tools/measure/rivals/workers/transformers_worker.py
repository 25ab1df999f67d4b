"""Decodes with transformers' generate: plainly, or with prompt lookup.

Serves two rivals: PyTorch's models in transformers, and ONNX Runtime's in optimum-onnx.
"""

import protocol
import torch
import transformers


class FirstTokens(transformers.StoppingCriteria):
    """Takes the time of the first tokens; stops nothing."""

    def __init__(self, watch, num_prompt_tokens):
        self.watch, self.num_prompt_tokens = watch, num_prompt_tokens

    def __call__(self, input_ids, scores, **kwargs):
        self.watch.tick(input_ids.shape[1] - self.num_prompt_tokens)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(settings):
    """Returns the model and the version of the library that runs it."""
    if settings["engine"] == "optimum":
        import importlib.metadata

        import onnxruntime
        from optimum.onnxruntime import ORTModelForCausalLM

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings["threads"]
        model = ORTModelForCausalLM.from_pretrained(settings["model"], session_options=options)
        return model, importlib.metadata.version("optimum-onnx")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32
    )
    return model, transformers.__version__


def open_engine(settings):
    """Opens a Hugging Face folder."""
    torch.set_num_threads(settings["threads"])
    model, version = load(settings)
    options = {}
    if settings["mode"] == "lookup":
        options["prompt_lookup_num_tokens"] = settings["lookup_tokens"]
        options["max_matching_ngram_size"] = settings["lookup_ngram"]
    # The checkpoint's own sampling parameters must not count.
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=settings["end_ids"], pad_token_id=settings["end_ids"][0]
    )

    def generate(ids, max_new_tokens):
        watch = protocol.Watch()
        ids_BT = torch.tensor([ids])
        criteria = transformers.StoppingCriteriaList([FirstTokens(watch, len(ids))])
        with torch.inference_mode():
            out_BT = model.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                stopping_criteria=criteria,
                **options,
            )
        return watch.reply(out_BT[0, len(ids) :].tolist())

    return version, generate


if __name__ == "__main__":
    protocol.serve(open_engine)
