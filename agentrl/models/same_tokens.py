"""Whether two models have the same tokens, which a teacher and its student must."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ModelFolderError


def check_same_tokens(student: Path, teacher: Path) -> None:
    """Raise ModelFolderError, with the first difference, when two folders' tokenizers give a token different ids."""
    own, other = vocabulary(student), vocabulary(teacher)
    for token, id_ in sorted(own.items(), key=lambda item: item[1]):
        if other.get(token) != id_:
            has = f"the id {other[token]}" if token in other else "no id"
            raise ModelFolderError(
                f"trainer.teacher: {teacher} has another tokenizer than {student}: {token!r} has the id {id_} here and "
                f"{has} there; distillation compares token by token, so choose a teacher of the same family"
            )


def vocabulary(folder: Path) -> dict[str, int]:
    """The id of each token, added tokens included."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        found: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        return found
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab())
