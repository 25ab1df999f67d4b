"""Makes OpenVINO's own int8 or int4 model of a GGUF file: runs in OpenVINO's environment.

    python compress_openvino.py FILE.gguf int8|int4 OUT

OpenVINO GenAI reads the file, which is to hold float16, and saves it as a graph; NNCF compresses
the graph's weights as `optimum-cli export openvino` would, int4 in groups of 32 as GGUF's are.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import nncf
import openvino
import openvino_genai

MODES = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 32, "ratio": 1.0},
}


def compress(source, precision, out):
    """Writes a folder that openvino_genai.LLMPipeline opens."""
    with tempfile.TemporaryDirectory() as scratch:
        # What is saved lies beside the file that was read.
        copy = shutil.copy(source, scratch)
        openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
        model = openvino.Core().read_model(Path(scratch) / "openvino_model.xml")
        compressed = nncf.compress_weights(model, **MODES[precision])
        out.mkdir(parents=True)
        openvino.save_model(compressed, out / "openvino_model.xml", compress_to_fp16=False)
        for file in Path(scratch).glob("openvino_*tokenizer.*"):
            shutil.copy(file, out)


if __name__ == "__main__":
    compress(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
