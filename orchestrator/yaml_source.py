"""Where in the YAML file is this key? Parsed data together with the line that each value stands on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import UserError


class Source:
    """A parsed YAML file that remembers its lines.

    Attributes:
        path: the file.
        data: the parsed mapping.
    """

    def __init__(self, path: Path) -> None:
        """Read and parse the file.

        Raises:
            UserError: the file is missing, is no YAML, holds no mapping, or gives a key twice.
        """
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise UserError(f"{path}:1: expected a mapping with models, benchmarks and grids")
            self._root: yaml.Node = root
            self._refuse_repeated_keys(self._root)
            # Construction also resolves merge keys in place, so that merged values have lines too.
            self.data: dict[str, Any] = loader.construct_document(self._root)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from error
        finally:
            loader.dispose()

    def line(self, location: Sequence[str | int]) -> int:
        """Line (from 1) of the key or list item at `location`, or of its nearest ancestor in the file."""
        node, line = self._root, 1
        for part in location:
            child = _child(node, part)
            if child is None:
                break
            line, node = child
        return line

    def has(self, location: Sequence[str | int]) -> bool:
        """Whether the file gives a value at `location`."""
        node = self._root
        for part in location:
            child = _child(node, part)
            if child is None:
                return False
            node = child[1]
        return True

    def error(self, location: Sequence[str | int], message: str) -> str:
        """`file:line: dotted.key: message`."""
        key = ".".join(str(part) for part in location)
        return f"{self.path}:{self.line(location)}: {key + ': ' if key else ''}{message}"

    def _refuse_repeated_keys(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value in seen:
                    first = seen[key.value]
                    raise UserError(f"{self.path}:{line}: {key.value!r} was already given on line {first}")
                seen[key.value] = line
                self._refuse_repeated_keys(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._refuse_repeated_keys(item)


def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        # The last one wins, as in the parsed data: a merged value stands before the mapping's own.
        for key, value in reversed(node.value):
            if key.value == str(part):
                return key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark.line + 1, item
    return None
