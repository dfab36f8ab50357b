"""Small deterministic BPE tokenizers, built for each test."""

import hashlib
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

BEGIN = "<|begin|>"
END = "<|end|>"

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "how do I join two paths? use os.path.join and the result is one path",
    "stop here and stop there, one two three four five six seven eight nine ten",
    "grüße aus köln, naïve café, 你好 世界, emoji 🙂🙃 and 👩‍💻",
]


def byte_level_tokenizer(with_begin: bool = False) -> tokenizers.Tokenizer:
    """Build a byte-level BPE with two special tokens; `with_begin` prepends one to every prompt, as Llama does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=[AddedToken(BEGIN, special=True), AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if with_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    return tokenizer


def sentence_piece_tokenizer() -> tokenizers.Tokenizer:
    """Build a SentencePiece-style BPE with byte fallback, whose decoder drops the space in front of a text."""
    words = ["▁a", "▁b", "a", "b", "▁hello", "▁world", "▁"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    for character in "helowrd":
        vocab.setdefault(character, len(vocab))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma_tokenizer() -> tokenizers.Tokenizer:
    """Build a BPE as Gemma's: byte fallback, spaces as a letter, turns as special tokens, a begin token."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    vocab = {name: index for index, name in enumerate(special)}
    for token in (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set("".join(_CORPUS) + "\n"))):
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def write_tokenizer(folder: Path, with_begin: bool = False) -> str:
    """Write `folder/tokenizer.json`; return its fingerprint."""
    path = folder / "tokenizer.json"
    byte_level_tokenizer(with_begin).save(str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_chat_template(folder: Path) -> None:
    """Add a chat template to a model folder: one line per message, then `assistant:`."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
