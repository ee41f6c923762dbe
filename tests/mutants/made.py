"""The mutants of a file: operators, signs, comparisons, constants, axes, reductions and transposes, one changed at a time."""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.mutants.known import KEYWORDS, NAMES, SPEED

BINARY = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult},
    **{ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
COMPARISONS = {  # at the limit, and the other way
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt)},
    **{ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
}
PAIRS = "min max, amin amax, minimum maximum, argmin argmax, mean sum, nanmean nansum, any all"
REDUCTIONS = dict([*map(str.split, PAIRS.split(",")), *(p.split()[::-1] for p in PAIRS.split(","))])
NOT_MUTATED = (ast.Raise, ast.Assert, ast.JoinedStr)  # messages
SCOPES = (ast.FunctionDef, ast.ClassDef)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""

    def other(**fields):
        return type(node)(**vars(node) | fields)

    match node:
        case ast.BinOp(op=ast.MatMult()):
            yield other(left=node.right, right=node.left)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in BINARY:
            yield other(op=BINARY[type(node.op)]())
        case ast.BoolOp():
            yield other(op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for new in COMPARISONS[type(op)]:
                    yield other(ops=[*node.ops[:at], new(), *node.ops[at + 1 :]])
        case ast.Constant(value=bool()):
            yield other(value=not node.value)
        case ast.Constant(value=int()):  # also axes: dim=-1 becomes dim=-2
            yield other(value=node.value + 1)
        case ast.Constant(value=float()):
            yield other(value=2 * node.value or 1.0)
        case ast.UnaryOp() if not isinstance(node.operand, ast.Constant):  # -x, not x, ~x
            yield node.operand
        case ast.Attribute(attr="mT" | "T"):
            yield node.value
        case ast.Attribute() if node.attr in REDUCTIONS:
            yield other(attr=REDUCTIONS[node.attr])
        case ast.Name(id="min" | "max" | "any" | "all"):
            yield other(id=REDUCTIONS[node.id])


def is_left(node: ast.AST) -> bool:
    """Whether a node is left as it is, for the reasons in `tests.mutants.known`."""
    if isinstance(node, NOT_MUTATED) or getattr(node, "arg", None) in KEYWORDS:
        return True
    if isinstance(node, ast.expr):
        return any(getattr(one, "id", None) in SPEED for one in ast.iter_child_nodes(node))
    of = [getattr(node, "target", None), *getattr(node, "targets", ())]
    names = {getattr(node, "name", None), *(getattr(one, "id", None) for one in of)}
    return bool(names & {*NAMES, *SPEED})


def mutants(file: str) -> dict[str, tuple[int, set[int], Callable]]:
    """Return each mutant of a file: by its text, its line, the lines that a test must reach, and what compiles it."""
    tree, found, seen = ast.parse(Path(file).read_text()), {}, {}

    def below(nodes: list[ast.AST]):
        for name, value in ast.iter_fields(nodes[-1]):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for at, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not is_left(child):
                    for new in variants(child):
                        add([*nodes, child], name, value, at, new)
                    below([*nodes, child])

    def add(nodes: list[ast.AST], name: str, old, at: int, new: ast.AST):
        parent = nodes[-2]
        value = [*old[:at], new, *old[at + 1 :]] if isinstance(old, list) else new

        def with_mutant(call: Callable):
            setattr(parent, name, value)
            result = call()
            setattr(parent, name, old)
            return result

        node = nodes[-1]
        small = (ast.Constant, ast.UnaryOp, ast.Slice, ast.Tuple, ast.Name, ast.keyword)
        if isinstance(node, small) or type(new) is not type(node):
            node = next(one for one in reversed(nodes[:-1]) if not isinstance(one, small))
            before, after = ast.unparse(node), with_mutant(lambda: ast.unparse(node))
        else:
            before, after = ast.unparse(node), ast.unparse(new)
        before, after = (text.partition("\n")[0] for text in (before, after))
        if before == after:  # x @ x
            return
        scope = ".".join(one.name for one in nodes if isinstance(one, SCOPES))
        text = f"{scope}: {before} -> {after}"
        seen[text] = seen.get(text, 0) + 1
        text += f" ({seen[text]})" * (seen[text] > 1)
        line = next(one.lineno for one in reversed(nodes) if hasattr(one, "lineno"))
        fixed = partial(ast.fix_missing_locations, tree)
        compiled = partial(with_mutant, lambda: compile(fixed(), file, "exec"))
        found[text] = line, lines_of(nodes), compiled

    below([tree])
    return found


def lines_of(nodes: list[ast.AST]) -> set[int]:
    """Return the lines that a test must reach: the statement's, or where what it defines at import is used."""
    last = [one for one in nodes if isinstance(one, ast.stmt)][-1]
    outside = [one for one in nodes if one is not last]
    if any(isinstance(one, ast.FunctionDef | ast.Lambda) for one in outside):
        body = getattr(last, "body", None)
        return {*range(last.lineno, body[0].lineno if body else last.end_lineno + 1)}
    if isinstance(last, ast.FunctionDef):
        return {*range(last.lineno, last.end_lineno + 1)}
    names = [one for one in ast.walk(nodes[0]) if isinstance(one, ast.Name)]
    inside = [one for one in ast.walk(last) if isinstance(one, ast.Name)]
    defined = {one.id for one in inside if isinstance(one.ctx, ast.Store)}
    used = {one.lineno for one in names if one.id in defined}
    return used - {last.lineno} or {*range(1, nodes[0].body[-1].end_lineno + 1)}
