"""Ten small networks from transformers with random weights, to be trained exactly.

Each function takes no argument and returns `(model, make_batch, loss)`: a model in
training mode with every dropout that its configuration knows switched on, a function
that draws a batch from torch's random state, and the loss of a batch. They are small in
width but not in structure: shared keys and values, experts chosen by the data, an
encoder and a decoder, shifted windows, stochastic depth, a scan over time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Case = tuple[nn.Module, Callable[[], Batch], Callable[[nn.Module, Batch], Tensor]]

CLASSES = 10
VOCABULARY = 256


def _pictures(batch: int, pixels: int) -> Callable[[], Batch]:
    def make_batch() -> Batch:
        pictures = torch.randn(batch, 3, pixels, pixels)
        return {"pixel_values": pictures, "labels": torch.randint(CLASSES, (batch,))}

    return make_batch


def _text(batch: int, length: int) -> Callable[[], Batch]:
    def make_batch() -> Batch:
        # Token 0 is the padding of some models, whose position ids depend on it.
        tokens = torch.randint(1, VOCABULARY, (batch, length))
        return {"input_ids": tokens, "labels": tokens}

    return make_batch


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Take the loss that a model from transformers computes by itself."""
    loss: Tensor = model(**batch).loss
    return loss


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return F.cross_entropy(logits, batch["labels"])


def resnet50() -> Case:
    """Build ResNet-50 with an eighth of its channels: batch norm, strided shortcuts."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64, 128, 256],
        depths=[3, 4, 6, 3],
        num_labels=CLASSES,
    )
    model = ResNetForImageClassification(config).train()
    return model, _pictures(8, 64), _class_loss


def vit() -> Case:
    """Build a vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=64,
        patch_size=8,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config).train()
    return model, _pictures(8, 64), _class_loss


def swin() -> Case:
    """Build Swin-T with a third of its channels: shifted windows, stochastic depth."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=112,
        patch_size=2,
        embed_dim=24,
        depths=[2, 2, 6, 2],
        num_heads=[1, 2, 4, 8],
        window_size=7,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.2,
        num_labels=CLASSES,
    )
    model = SwinForImageClassification(config).train()
    return model, _pictures(2, 112), _class_loss


def bert() -> Case:
    """Build BERT for question answering."""
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = BertForQuestionAnswering(config).train()

    def make_batch() -> Batch:
        start, end = torch.randint(64, (2, 8))
        tokens = torch.randint(1, VOCABULARY, (8, 64))
        mask = (torch.arange(64) < torch.randint(32, 65, (8, 1))).long()
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "start_positions": start,
            "end_positions": end,
        }

    return model, make_batch, _own_loss


def gpt2(*, length: int = 64) -> Case:
    """Build GPT-2, whose head shares the weights of its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=64,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train(), _text(8, length), _causal_loss


def _causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def llama() -> Case:
    """Build Llama with two query heads to each key and value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config).train(), _text(8, 64), _own_loss


def t5() -> Case:
    """Build T5: an encoder and a decoder with relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train(), _text(4, 48), _own_loss


def whisper() -> Case:
    """Build Whisper on spectrograms, with layers dropped by Python's own dice."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=64,
        max_target_positions=32,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = WhisperForConditionalGeneration(config).train()

    def make_batch() -> Batch:
        labels = torch.randint(3, VOCABULARY, (4, 24))
        return {"input_features": torch.randn(4, 16, 128), "labels": labels}

    return model, make_batch, _own_loss


def mixtral() -> Case:
    """Build Mixtral: two of four experts a token, chosen by the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
        router_jitter_noise=0.01,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config).train(), _text(4, 48), _own_loss


def mamba() -> Case:
    """Build Mamba, whose scan runs in Python step by step on a CPU."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        state_size=8,
        num_hidden_layers=2,
    )
    return MambaForCausalLM(config).train(), _text(4, 32), _own_loss


MODELS: dict[str, Callable[[], Case]] = {
    "resnet50": resnet50,
    "vit": vit,
    "swin": swin,
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "whisper": whisper,
    "mixtral": mixtral,
    "mamba": mamba,
}
