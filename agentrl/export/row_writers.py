"""Writes pages of rows as Parquet or JSONL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from agentrl.errors import UserError
from agentrl.store.exports.columns import Columns, Kind, Row


class JsonlWriter:
    """One JSON object per line. Arrays are lists; float32 values have their shortest exact form."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._names = list(columns)
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        self._file.writelines(
            orjson.dumps({name: row.get(name) for name in self._names}, option=option) for row in rows
        )


class ParquetWriter:
    """zstd-compressed Parquet with one row group per page. Raises UserError without pyarrow."""

    def __init__(self, path: Path, columns: Columns) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError as error:
            raise UserError("Parquet needs pyarrow: pip install 'agentrl[export]', or use --format jsonl") from error
        self._pa, self._columns = pa, columns
        types: dict[Kind, Any] = {
            "text": pa.string(),
            "json": pa.string(),
            "int": pa.int64(),
            "float": pa.float64(),
            "bool": pa.bool_(),
            "ids": pa.list_(pa.int32()),
            "floats": pa.list_(pa.float32()),
            "doubles": pa.list_(pa.float64()),
            "bools": pa.list_(pa.bool_()),
        }
        self._schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows as one row group."""
        if rows:
            arrays = [self._array(field, [row.get(field.name) for row in rows]) for field in self._schema]
            self._writer.write_table(self._pa.Table.from_arrays(arrays, schema=self._schema))

    def _array(self, field: Any, values: list[Any]) -> Any:
        kind = self._columns[field.name]
        if kind == "json":
            return self._pa.array(
                [None if v is None else orjson.dumps(v, option=orjson.OPT_SERIALIZE_NUMPY).decode() for v in values],
                field.type,
            )
        if kind not in ("ids", "floats", "doubles", "bools"):
            return self._pa.array(values, field.type)
        lengths = [0 if v is None else len(v) for v in values]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        flat = np.concatenate([v for v in values if v is not None] or [np.empty(0)])
        missing = self._pa.array([v is None for v in values])
        items = self._pa.array(flat.astype(field.type.value_type.to_pandas_dtype(), copy=False), field.type.value_type)
        return self._pa.ListArray.from_arrays(self._pa.array(offsets), items, mask=missing)


WRITERS: dict[str, type[JsonlWriter] | type[ParquetWriter]] = {"parquet": ParquetWriter, "jsonl": JsonlWriter}
