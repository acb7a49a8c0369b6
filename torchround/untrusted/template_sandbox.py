"""A Jinja sandbox in which a template can neither run forever nor fill the memory.

Jinja's own sandbox keeps templates from private attributes and files, but not from nested loops, recursion, or a text
of ten billion letters. Here each turn of a loop, each call and each text that is put together counts as work, and the
work of one rendering is limited.
"""

import re
import threading
from collections.abc import Callable, Iterable, Sized
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_WORK = 2_000_000  # in turns of a loop: one or two seconds; released templates take about 20 per message
CALL_WORK = 10  # a call takes as long as this many turns of a loop
CHARACTERS_PER_WORK = 256
MOST_CHARACTERS = 100_000_000
MOST_WIDTH = 10_000

_WIDE_FORMAT = re.compile(r"[%:{][^a-zA-Z%]*(\*|\d{5,})")
_PADDED = {
    "ljust",
    "rjust",
    "center",
    "zfill",
    "expandtabs",
    "indent",
    "tojson",
    "batch",
    "slice",
    "wordwrap",
}
# A random text would differ after a resume.
_LEFT_OUT = ("random", "lipsum")


class TemplateLimitError(TemplateError):
    """An error for a template that does more than any chat template needs."""


class WorkMeter(threading.local):
    """Counter of the work of this thread's present rendering."""

    spent = 0.0

    def add(self, amount: float) -> None:
        self.spent += amount
        if self.spent > MOST_WORK:
            raise TemplateLimitError(f"more than {MOST_WORK:,} turns of loops and calls")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Compile `metered(source)`, and call `begin` before each rendering."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._work = WorkMeter()
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters["counted"] = self._counted
        self.filters["joined"] = self._joined

    def begin(self) -> None:
        """Start counting the work of a rendering from zero."""
        self._work.spent = 0.0

    def metered(self, source: str) -> nodes.Template:
        """Parse a template, so that its work is counted when it is rendered."""
        parsed = self.parse(source)
        # Wrapped here and not in `__init__`: by now the caller has put in its own filters, such as `tojson`.
        for name in ("center", "indent", "tojson", "batch", "slice", "wordwrap", "replace", "join", "format"):
            self.filters[name] = self._sized(name, self.filters[name])
        metered: nodes.Template = Metering(self).visit(parsed)
        return metered

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count and check each call in a template."""
        self._work.add(CALL_WORK)
        # A method of a string is checked before it runs; `_made` counts its result only after that has filled the memory.
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_size(getattr(obj, "__name__", ""), owner, [*args, *kwargs.values()])
        return self._made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the operators that can make large values of small ones, and count their work."""
        sized = [value for value in (left, right) if hasattr(value, "__len__")]
        if operator == "*" and sized:
            other = right if sized[0] is left else left
            _refuse(isinstance(other, int) and len(sized[0]) * other > MOST_CHARACTERS)
        elif operator == "**":
            _refuse(abs(right) > 64 or abs(left) > 10**9)
        elif operator == "%" and isinstance(left, str):
            _check_size("format", left, [])
        return self._made(super().call_binop(context, operator, left, right))

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        # Items of known number are charged at once; those of a generator while the loop takes them.
        if isinstance(items, Sized):
            self._work.add(len(items) + 1)
            return items
        return self._counted_one_by_one(items)

    def _counted_one_by_one(self, items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            self._work.add(1)
            yield item

    def _joined(self, first: Any, *others: Any) -> str:
        return str(self._made("".join(map(str, (first, *others)))))

    def _made(self, value: Any) -> Any:
        if isinstance(value, (str, list)):
            self._work.add(len(value) / CHARACTERS_PER_WORK)
        return value

    def _sized(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            # Jinja passes some filters their context or environment first, which is not a value of the template.
            values = [
                value for value in args if not hasattr(value, "eval_ctx") and not hasattr(value, "autoescape")
            ]
            _check_size(name, values[0], [*values[1:], *kwargs.values()])
            return self._made(function(*args, **kwargs))

        if hasattr(function, "jinja_pass_arg"):
            limited.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return limited


class Metering(NodeTransformer):
    """Changes a parsed template: a counting filter around the items of each loop, and in place of each `~`."""

    def __init__(self, environment: LimitedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr), "a loop goes over an expression"
        node.iter = self._filter(node, node.iter, "counted", [])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, node.nodes[0], "joined", node.nodes[1:])

    def _filter(self, at: nodes.Node, value: nodes.Expr, name: str, others: list[nodes.Expr]) -> nodes.Filter:
        made = nodes.Filter(value, name, others, [], None, None, lineno=at.lineno)
        made.set_environment(self._environment)
        return made


def _check_size(name: str, value: Any, others: list[Any]) -> None:
    """Refuse a method or filter call, before it runs, if its result would be too large."""
    if name in _PADDED:
        _refuse(any(isinstance(other, int) and abs(other) > MOST_WIDTH for other in others))
    elif name in ("format", "format_map"):
        _refuse(_WIDE_FORMAT.search(str(value)) is not None)
        _refuse(any(isinstance(other, int) and abs(other) > 2**63 for other in others))
    elif name == "replace" and len(others) >= 2:
        old, new = (len(str(other)) for other in others[:2])
        _refuse(len(str(value)) / max(old, 1) * new > MOST_CHARACTERS)
    elif name == "join" and isinstance(value, str):
        _refuse(
            len(value) * sum(len(other) for other in others if hasattr(other, "__len__")) > MOST_CHARACTERS
        )


def _refuse(is_too_large: bool) -> None:
    if is_too_large:
        raise TemplateLimitError("a text, list or number larger than any conversation needs")
