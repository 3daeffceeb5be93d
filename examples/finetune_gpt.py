"""Fine-tune a GPT-2 with dropout on synthetic text and print the loss of every step.

A plain PyTorch script: nothing in it knows of memory budgets. Run it as it is, or as
`lowtide run --budget 1GiB examples/finetune_gpt.py`: the losses, printed to the last
bit in hexadecimal, are the same, although dropout draws random numbers in every layer.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on sequences that count upwards from a random token in random strides."""
    args = arguments()
    torch.manual_seed(args.seed)
    config = GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.heads,
        vocab_size=args.vocab,
        n_positions=args.length,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        started = time.perf_counter()
        start = torch.randint(args.vocab, (args.batch, 1))
        stride = torch.randint(1, 4, (args.batch, 1))
        tokens = (start + stride * torch.arange(args.length)) % args.vocab
        optimizer.zero_grad()
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        value = loss.item()
        seconds = time.perf_counter() - started
        print(
            f"step {step:3d}  loss {value:.9f}  {value.hex()}  {seconds:6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
