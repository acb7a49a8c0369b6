"""What llama.cpp's converter takes from an export: class, sizes, names of tensors and files of the tokenizer.

docs/trying.md says with which version the converter itself ran. It reads the folder by these facts alone.
"""

import json

import pytest
import torch
import transformers
from safetensors import safe_open

import train
from tests.support.batch_contents import TEMPLATE, write_lines
from tests.support.model_tools import released_tensors
from tests.support.small_run import working_in
from tests.support.toy_release import load_model, write_tokenizer
from torchround.checkpoint.folders import checkpoint_name

CONFIG = """
model = { family = "FAMILY", shape = { num_layers = 2, hidden_size = 32, num_heads = 4, num_kv_heads = 2, ffn_size = 32 MORE } }
tokenizer = { path = "tokens" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 1, seq_len = 16, global_batch_size = 2 }
engine = { devices = "cpu", cpu_threads = 1, measure_steps = 0 }
checkpoint = { export = "weights" }
"""
EXPERTS = ", num_experts = 4, num_chosen = 2"
# By case: the family, more of its shape, and the class whose converter llama.cpp takes.
EXPORTS = {
    "llama3": ("llama3", "", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "", "Qwen3ForCausalLM"),
    "qwen3, experts": ("qwen3", EXPERTS, "Qwen3MoeForCausalLM"),
    "gpt_oss": ("gpt_oss", EXPERTS, "GptOssForCausalLM"),
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
OF_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_has_the_class_sizes_names_and_tokenizer_that_a_converter_reads(case, tmp_path):
    family, more, class_name = EXPORTS[case]
    with working_in(tmp_path) as folder:
        write_lines(folder / "text.jsonl", [{"text": f"{n} bottles"} for n in range(20)])
        (folder / "tokens").mkdir()
        write_tokenizer(folder / "tokens", family)
        (folder / "tokens" / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "run.toml").write_text(CONFIG.replace("FAMILY", family).replace(" MORE", more))
        assert train.main(["--config=run.toml"]) == 0
        export = folder / "outputs" / "run" / "export" / checkpoint_name(1)
        config = json.loads((export / "config.json").read_text())
        assert config["architectures"] == [class_name]
        for key, size in (SIZES | (OF_EXPERTS if more else {})).items():
            assert config.get(key, size) == size and (key in config or key in OF_EXPERTS), key
        assert {"rms_norm_eps", "max_position_embeddings", "head_dim", "vocab_size"} <= config.keys()
        with safe_open(export / "model.safetensors", "pt") as file:
            assert set(file.keys()) == released_tensors(load_model(export)).keys()
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        tokenizer = transformers.AutoTokenizer.from_pretrained(export)
        assert max(tokenizer.get_vocab().values()) < config["vocab_size"]
        assert tokenizer.chat_template == TEMPLATE
