"""Whether two models have the same tokens, which a policy and its teacher or critic must."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ModelFolderError


def check_same_tokens(policy: Path, other: Path, field: str = "trainer.teacher") -> None:
    """Raise ModelFolderError, with the `field` of the other model and the first difference, when the tokenizers of two
    folders give a token different ids.
    """
    own, others = vocabulary(policy), vocabulary(other)
    for token, id_ in sorted(own.items(), key=lambda item: item[1]):
        if others.get(token) != id_:
            has = f"the id {others[token]}" if token in others else "no id"
            raise ModelFolderError(
                f"{field}: {other} has another tokenizer than {policy}: {token!r} has the id {id_} here and {has} "
                "there; both models read the same token ids, so choose one of the same family"
            )


def vocabulary(folder: Path) -> dict[str, int]:
    """The id of each token, added tokens included."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        found: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        return found
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab())


LEAST_EQUAL = 0.9
"""Share of texts that must be equal: servers may write single bytes of a character, or white space, in other ways."""


def check_same_texts(student: Path, teacher: str, ids: Sequence[int], texts: Sequence[str]) -> None:
    """Raise ModelFolderError when a server's texts of some tokens are not those of the student's tokenizer."""
    from tokenizers import Tokenizer

    if not (student / "tokenizer.json").is_file():
        return
    tokenizer = Tokenizer.from_file(str(student / "tokenizer.json"))
    own = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    pairs = [(token, a, b) for token, a, b in zip(ids, own, texts, strict=True) if a and b and "\ufffd" not in a + b]
    differ = [pair for pair in pairs if pair[1].strip() != pair[2].strip()]
    if len(differ) > (1 - LEAST_EQUAL) * len(pairs):
        token, here, there = differ[0]
        raise ModelFolderError(
            f"trainer.teacher: {teacher} has another tokenizer than {student}: the id {token} is {here!r} here and "
            f"{there!r} there; distillation compares token by token, so choose a teacher of the same family"
        )
