"""Decodes with onnxruntime-genai: plainly, in the model's own precision."""

import onnxruntime_genai as og
import protocol


def open_engine(settings):
    """Opens a model that genai's builder made; the number of threads is in its config."""
    config = og.Config(settings["model"])
    threads = {"intra_op_num_threads": settings["threads"]}
    config.overlay(protocol.json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = og.Model(config)

    def answer(prompts, clients, max_new_tokens):
        load = protocol.Load(prompts)
        while found := load.take():
            one, ids = found
            params = og.GeneratorParams(model)
            length = len(ids) + max_new_tokens
            params.set_search_options(do_sample=False, max_length=length, batch_size=1)
            generator = og.Generator(model, params)
            generator.append_tokens(ids)
            while not generator.is_done():
                generator.generate_next_token()
                load.add(one, [int(generator.get_next_tokens()[0])])
        return load.reply()

    return og.__version__, answer


if __name__ == "__main__":
    protocol.serve(open_engine)
