"""A trained model as a folder that needs torch and numpy alone.

serve.py            the source of the model, and code that loads it
model.json          the arguments of the model
dense.safetensors   its dense part
tables/000.safetensors  one file for each table, mapped into memory when it is read
export.json         every file with its size and checksum, for `hotrow verify`
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from hotrow.checkpoint.tables import (
    SERVED,
    ExportedTable,
    Weights,
    dense_numbers,
    open_weights,
    row_numbers,
    write_export,
)
from hotrow.checkpoint.tensors import packed, table_parts
from hotrow.models import MODELS, layers
from hotrow.run import serve_template
from hotrow.run.config import RunConfig
from hotrow.run.job import open_data, tables_of
from hotrow.run.source import Samples
from hotrow.support.files import Disk


def export_for_serving(config: RunConfig, source: str | Path, folder: str | Path) -> None:
    """Write the model of a run, with the weights of a checkpoint or model, to a new folder."""
    folder, weights, samples = Path(folder), open_weights(source), open_data(config)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give another folder, or empty it")
    try:
        _export(config, weights, samples, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a model cannot serve
        raise


def _export(config: RunConfig, weights: Weights, samples: Samples, folder: Path) -> None:
    disk, model = Disk(folder), MODELS[config.model.kind]
    tables, exported, files = [], [], []
    for number, (table, saved) in enumerate(
        zip(tables_of(config, samples), weights.tables, strict=True)
    ):
        file = f"tables/{number:03}.safetensors"
        rows = (piece for _, piece in row_numbers(weights, saved))
        files.append(disk.write(file, table_parts("weight", (saved.rows, saved.dim), rows)))
        exported.append(ExportedTable("weight", file, saved.rows, saved.dim))
        about = {key: getattr(table, key) for key in ("name", "embedding_dim", "pooling")}
        about |= {"feature_names": list(table.feature_names), "padding_idx": table.padding_idx}
        tables.append(about | {"file": file})
    files.append(disk.write("dense.safetensors", packed(dense_numbers(weights))))
    facts = {
        "model": model.__name__,
        "num_dense": samples.num_dense,
        "arguments": config.model.arguments,
        "tables": tables,
    }
    files.append(disk.write("model.json", [json.dumps(facts, indent=1).encode()]))
    files.append(disk.write("serve.py", [_source(model).encode()]))
    write_export(folder, SERVED, exported, files)


def _source(model: type) -> str:
    """Return layers, the model and the template as one module."""
    parts = [
        _without_imports(module) for module in (layers, inspect.getmodule(model), serve_template)
    ]
    imports = sorted({line for _, lines in parts for line in lines})
    future = "from __future__ import annotations\n"
    about = '"""A model that hotrow has trained: `import serve; model = serve.load()`."""\n'
    return "\n".join([about, future, *imports, *(text for text, _ in parts)])


def _without_imports(module: Any) -> tuple[str, list[str]]:
    """Return the lines of a module, and its imports that are not hotrow's."""
    text = inspect.getsource(module)
    # Drops the branch for a kernel of hotrow, which has the same result up to rounding.
    text = text.replace("if dense.is_cuda:", "if False:")
    lines, imports = text.splitlines(keepends=True), []
    for node in reversed(ast.parse(text).body):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or is_docstring:
            del lines[node.lineno - 1 : node.end_lineno]
        if is_import:
            imports.append(ast.unparse(node))
    kept = [line for line in imports if "hotrow" not in line and "__future__" not in line]
    return "".join(lines), kept
