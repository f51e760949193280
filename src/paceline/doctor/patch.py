"""A diff of a training script that balances it.

The watch knows the lines at which the script made its model, fetched a batch, ran the backward pass and stepped the
optimizer. If these are in one file and the syntax tree has a form that is recognized, the change is a unified diff,
which ``patch -p0`` applies.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.doctor.phases import LoopForm

ADAPTERS = {  # by framework
    "lightning": "BalancedCallback",
    "fabric": "FabricPace",
    "accelerate": "AcceleratePace",
    "transformers": "BalancedTrainer",
    "ray_train": "RayTrainPace",
}
SETS_UP = {  # by framework: methods of its object that wrap a model; the adapter is given that object
    "accelerate": ("prepare", "prepare_model"),
    "fabric": ("setup", "setup_module"),
}
PLACES = ("made", "fetch", "backward", "step")
SEVERAL = ("zip", "zip_longest", "chain", "product")  # calls whose other loaders would not be balanced
Scope = ast.FunctionDef | ast.Module


class UnknownForm(Exception):
    """The script has a form that is not recognized. Its text says what was looked for, and what was found."""


def patched(loop: LoopForm, options: list[str]) -> list[str]:
    """The diff for a loop over a DataLoader with one backward pass a step. options: the balancing class's arguments.

    Raises UnknownForm if the script is not recognized."""
    if unseen := [_at(name) for name in PLACES if name not in loop.places]:
        raise UnknownForm(f"{unseen[0]}, and did not see that in a file of yours")
    if len(files := {file for file, _ in loop.places.values()}) != 1:
        found = ", ".join(f"{os.path.basename(file)}:{line}" for file, line in loop.places.values())
        raise UnknownForm(f"model, loader, backward pass and step in one file, and found them at {found}")
    name = files.pop()
    try:
        text = Path(name).read_bytes().decode()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError) as error:
        raise UnknownForm(f"a file of Python text, and could not read {name}") from error
    if "\r" in text:  # a terminal does not show it, so `patch` would not find the lines
        raise UnknownForm("lines that end without a carriage return, and found some that have one")
    new = _Script(text, tree, loop).changed(options)
    short = os.path.relpath(name)
    short = name if short.startswith(os.pardir) else short
    before, after = ([*io.StringIO(each)] for each in (text, new))  # str.splitlines splits at more characters
    lines = [*difflib.unified_diff(before, after, short, short, n=2)]
    # A patch that is printed with blanks before its lines cannot express a last line without a newline.
    if not all(line.endswith("\n") for line in lines):
        raise UnknownForm("a newline at the end of the script, and found none")
    return [line[:-1] for line in lines]


def _at(name: str) -> str:
    return {
        "made": "the line that makes the DistributedDataParallel module",
        "fetch": "the loop over the DataLoader",
        "backward": "the line of the backward pass",
        "step": "the line of the optimizer's step",
    }[name]


class _Script:
    """A script's syntax tree and the edits of its text. An edit is its begin and end, in bytes, and the new text."""

    def __init__(self, text: str, tree: ast.Module, loop: LoopForm) -> None:
        self.text, self.tree, self.host = text.encode(), tree, loop.host
        self.lines = {name: line for name, (_, line) in loop.places.items()}
        self.given = (loop.loader or {}).get("options")
        self.starts = [0]
        for line in self.text.splitlines(True):
            self.starts.append(self.starts[-1] + len(line))
        self.above = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.edits: list[tuple[int, int, str]] = []
        self.reached: set[Scope] = set()  # functions that are given the pace

    def changed(self, options: list[str]) -> str:
        """The text of the changed script."""
        names = {node.id for node in self._all(self.tree, ast.Name)}
        if taken := names & {"pace", "balanced"}:
            raise UnknownForm(f"a name for the new object, and found that {taken.pop()} has another use")
        if self.given is None:
            raise UnknownForm("a sampler of torch's in the DataLoader, and found another one")
        kind = ADAPTERS[self.host] if self.host else ""
        if self.host == "lightning":
            self._lightning(kind, ", ".join(options))
        elif self.host == "transformers":
            self._trainer(kind, ", ".join(options[1:]))
        else:
            self._loop(kind or "paceline.torch.Pace", ", ".join(options))
        imported = f"from paceline.hosts.{self.host} import {kind}" if kind else "import paceline.torch"
        imports = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        first = [node for node in imports if getattr(node, "module", "") != "__future__"] or imports[-1:]
        if not first:
            raise UnknownForm("an import at the top of the script, and found none")
        self._put(self.starts[first[0].lineno - 1], f"{imported}\n")
        text = self.text
        # From the end of the text to its beginning. Of two insertions at one place, the later request comes second.
        for start, end, new in sorted(self.edits, key=lambda edit: edit[0])[::-1]:
            text = text[:start] + new.encode() + text[end:]
        try:
            ast.parse(text)
        except SyntaxError as error:  # such as a statement behind a colon, on its line
            raise UnknownForm("one statement on each of these lines, and found several") from error
        return text.decode()

    def _loop(self, kind: str, options: str) -> None:
        """Edit a loop that the script itself has."""
        made, model = self._model()
        self.outer, self.owner = self._scope(made), model.rpartition(".")[0]
        self.pace = f"{self.owner}.pace" if self.owner else "pace"
        back, step = self._call("backward"), self._call("step")
        loader = self._loader()
        for call in (back, step):
            self._reach(self._scope(call))
        asks = f"{self._framework(made)}, " if self.host in SETS_UP else ""
        self._behind(self._whole(made), f"{self.pace} = {kind}({asks}{model}, {options})")
        makes = [each for each in self._all(self.outer, ast.Assign) if loader in self._targets(each)]
        last = max(map(self._whole, [made, *makes]), key=lambda node: node.lineno)
        self._behind(last, f"{loader} = {self.pace}.loader({loader}.dataset{self._options(loader)})")
        loss = self._passes(back, step, steps=self.host != "accelerate")
        self._averages(back, loss)

    def _lightning(self, kind: str, options: str) -> None:
        """Edit the calls that make a Trainer and begin its fit."""
        fit, made = self._framework_call("fit")
        named = {each.arg: each.value for each in fit.keywords}
        loader = named.get("train_dataloaders", fit.args[1] if len(fit.args) > 1 else None)
        if not isinstance(loader, ast.Name | ast.Attribute) or self._code(loader) == "None":
            raise UnknownForm("a DataLoader by name as the second argument of fit, and found none")
        before = " " * made.col_offset + f"balanced = {kind}({options})\n"
        self._put(self.starts[made.lineno - 1], before)
        called = made.value
        callbacks = next((each.value for each in called.keywords if each.arg == "callbacks"), None)
        if callbacks is None:
            comma = "" if not (called.args or called.keywords) else ", "
            within = self.text[: self._span(called)[1] - 1].rstrip()
            if within.endswith(b","):
                self._put(len(within), " callbacks=[balanced]")
            else:
                self._put(len(within), f"{comma}callbacks=[balanced]")
        elif isinstance(callbacks, ast.List):
            self._put(self._span(callbacks)[0] + 1, "balanced, " if callbacks.elts else "balanced")
        else:
            raise UnknownForm("a list of callbacks in the call of Trainer, and found another expression")
        name = self._code(loader)
        self._replace(loader, f"balanced.loader({name}.dataset{self._options(name)})")

    def _trainer(self, kind: str, options: str) -> None:
        """Edit the call that makes a Hugging Face Trainer."""
        _, made = self._framework_call("train")
        if not self._code(made.value.func).rpartition(".")[2] == "Trainer":
            raise UnknownForm(
                f"transformers' Trainer itself; for {self._code(made.value.func)}, write a class of {kind} and it"
            )
        self._replace(made.value.func, kind)
        if options:
            name, _, value = options.partition("=")
            self._put(self._span(made.value)[1] - 1, f', balance={{"{name}": {value}}}')

    def _framework_call(self, method: str) -> tuple[ast.Call, Any]:
        """The call that runs the training, and the assignment that makes its Trainer, in the same function."""
        line = self.lines["made"]
        calls = [node for node in self._all(self.tree, ast.Call) if self._covers(node, line)]
        what = f"a call of {method}(...) at line {line}"
        call = self._only([node for node in calls if self._code(node.func).endswith(f".{method}")], what)
        owner, scope = self._of(call), self._scope(call)
        makes = [node for node in self._all(scope, ast.Assign) if owner in self._targets(node)]
        made = self._only(makes, f"the assignment of {owner}, in the function of line {line}")
        if not isinstance(made.value, ast.Call) or made.lineno >= call.lineno:
            raise UnknownForm(f"a call that makes {owner} above line {line}, and found none")
        return call, made

    def _framework(self, made: Any) -> str:
        """The Accelerator or the Fabric, as text: the object whose method wraps the model."""
        calls = [each for each in self._all(made, ast.Call) if isinstance(each.func, ast.Attribute)]
        owners = {self._of(each) for each in calls if each.func.attr in SETS_UP[self.host]}
        name = "the Accelerator" if self.host == "accelerate" else "the Fabric"
        return str(self._only(owners, f"{name} whose {SETS_UP[self.host][0]} wraps the model"))

    def _options(self, loader: str) -> str:
        """The options of this loader, as arguments."""
        return "".join(f", {option.format(loader=loader)}" for option in self.given or [])

    def _model(self) -> tuple[Any, str]:
        """The statement that makes the data-parallel model, and the model's name."""
        assigned, line = self._all(self.tree, ast.Assign), self.lines["made"]
        covering = [node for node in assigned if self._covers(node, line)]
        made = self._only(covering, f"an assignment of the DistributedDataParallel module at line {line}")
        names = self._targets(made)
        called = {self._code(node.func) for node in self._all(self.tree, ast.Call)}
        models = names if len(names) == 1 else [name for name in names if name in called]
        return made, self._only(models, f"one name of line {line} that is called as the model")

    def _loader(self) -> str:
        """The loader's name in the scope that makes the model."""
        loops, line = self._all(self.tree, ast.For), self.lines["fetch"]
        covering = [node for node in loops if self._covers(node.iter, line)]
        each = self._only(covering, f"a for loop over the DataLoader at line {line}")
        what = each.iter
        while isinstance(what, ast.Call) and what.args:  # enumerate(...), tqdm(...)
            if self._code(what.func).rpartition(".")[2] in SEVERAL:
                raise UnknownForm(f"a loop over one loader, and found {self._code(what)}")
            what = what.args[0]
        name, scope = self._code(what), self._scope(each)
        if self.owner:
            if not name.startswith(f"{self.owner}."):
                raise UnknownForm(f"the loader as an attribute of {self.owner}, and found {name}")
            return name
        if not isinstance(what, ast.Name):
            raise UnknownForm(f"a loop over a loader by its name, and found {name}")
        while scope is not self.outer and name in (parameters := self._parameters(scope)):
            calls, at = self._calls(scope), parameters.index(name)
            given = {self._code(value) for call in calls for value in call.args[at : at + 1]}
            given |= {self._code(each.value) for call in calls for each in call.keywords if each.arg == name}
            function = getattr(scope, "name", "")
            name = self._only(given, f"one loader that {function} is called with")
            scope = self._only({self._scope(call) for call in calls}, f"one function that calls {function}")
        if isinstance(self.outer, ast.FunctionDef):
            if scope is not self.outer or (
                name not in self._assigned(scope) and name not in self._parameters(scope)
            ):
                raise UnknownForm(f"the loader {name} in {self.outer.name}, which makes the model")
        elif scope is not self.outer and name in self._assigned(scope):
            raise UnknownForm(f"the loader {name} beside the model, and found it in another function")
        return name

    def _reach(self, scope: Scope) -> None:
        """Make the pace available in this function: as a name of the module, an attribute, or a parameter."""
        if scope is self.outer or scope in self.reached or isinstance(self.outer, ast.Module):
            return
        self.reached.add(scope)
        if self.owner:
            if self.above[scope] is not self.above[self.outer]:
                raise UnknownForm(
                    f"model and loop in one class, and found {getattr(scope, 'name', '')} elsewhere"
                )
            return
        self._parameters(scope)
        assert isinstance(scope, ast.FunctionDef)
        if not scope.args.args:
            raise UnknownForm(f"a parameter of {scope.name}, behind which to pass the pace, and found none")
        last: ast.expr | ast.arg = (scope.args.defaults or scope.args.args)[-1]
        self._put(self._span(last)[1], ", pace=None" if scope.args.defaults else ", pace")
        for call in self._calls(scope):
            self._put(self._span(call)[1] - 1, ", pace=pace")
            self._reach(self._scope(call))

    def _passes(self, back: ast.Call, step: ast.Call, steps: bool) -> str:
        """Edit the backward pass and the optimizer's step; returns the name of the loss."""
        loss, scaler = back.args[0] if back.args else back.func.value, ""  # type: ignore[attr-defined]
        if isinstance(loss, ast.Call) and self._code(loss.func).endswith(".scale"):
            scaler, loss = self._of(loss), loss.args[0]
        if back.keywords or len(back.args) > 1 or len(step.args) != bool(scaler):
            raise UnknownForm("a backward pass and a step without further arguments, and found some")
        self._check_mean(self._scope(back), loss)
        more = f", scaler={scaler}" if scaler else ""
        self._replace(back, f"{self.pace}.backward({self._code(loss)}{more})")
        if scaler:
            self._replace(step, f"{self.pace}.step({self._code(step.args[0])}, {scaler})")
            for node in self._all(self._scope(step), ast.Expr):
                if self._code(node) == f"{scaler}.update()":
                    start, end = self.starts[node.lineno - 1], self.starts[node.end_lineno]
                    if self.text[start:end].strip() != self._code(node).encode():
                        raise UnknownForm(f"{scaler}.update() on a separate line, and found more there")
                    self.edits.append((start, end, ""))
        elif steps:
            self._replace(step, f"{self.pace}.step({self._of(step)})")
        return self._code(loss)

    def _check_mean(self, scope: Scope, loss: ast.AST) -> None:
        """Raises UnknownForm for a loss that is clearly a sum over the batch, even if it is then divided, also within
        functions and classes of the script that it is made by."""
        values = [loss]
        for within in (scope, self.tree):  # loss = criterion(...); criterion = Criterion(reduction="sum")
            names = {self._code(getattr(value, "func", value)) for value in values}
            values += [node.value for node in self._all(within, ast.Assign) if names & {*self._targets(node)}]
        made = {node.name: node for node in self._all(self.tree, ast.FunctionDef | ast.ClassDef)}
        for value in values:  # the list grows during the loop
            called = {self._code(call.func).rpartition(".")[2] for call in self._all(value, ast.Call)}
            values += [made.pop(name) for name in called & made.keys()]
        for call in (call for value in values for call in self._all(value, ast.Call)):
            name = self._code(call.func)
            given = len(call.args) - (name == "torch.sum")  # dimensions over which it sums
            sums = name.endswith(".sum") and not (given or call.keywords)
            if sums or "sum" in {self._code(each.value).strip("\"'") for each in call.keywords}:
                raise UnknownForm("a loss that is a mean over the batch, and found a sum")

    def _averages(self, back: ast.Call, loss: str) -> None:
        """Replace a rank's own mean loss by the round's loss if the script averages it over the ranks."""
        scope = self._scope(back)
        assigned = [*self._all(scope, ast.Assign), *self._all(scope, ast.AugAssign)]
        calls = [call for call in self._all(scope, ast.Call) if self._code(call.func).endswith("all_reduce")]
        summed = {self._code(call.args[0]) for call in calls if call.args}
        for _ in range(2):  # the script may first sum the loss over some steps
            sources = [node for node in assigned if summed & {*self._targets(node)}]
            summed |= {part.id for node in sources for part in self._all(node.value, ast.Name)} - {loss}
        for node in assigned:
            if node.lineno <= back.lineno or not summed & {*self._targets(node)}:
                continue
            within = self._all(node.value, ast.Call)
            parts = [part for part in within if self._code(part).startswith(f"{loss}.")]
            for part in parts[:1]:  # the outermost one
                own = self._code(part)
                now = f"{self.pace}.loss_now()"
                self._replace(part, now if own.endswith(".item()") else f"{own}.clone().fill_({now})")

    # -- the tree ---------------------------------------------------------------------------------------------

    def _all(self, within: ast.AST, kind: Any) -> Iterator[Any]:
        return (node for node in ast.walk(within) if isinstance(node, kind))

    def _only(self, found: Any, what: str) -> Any:
        """The only element; raises UnknownForm if there are more or none. what: the element, for the message."""
        if len(found) != 1:
            raise UnknownForm(f"{what}, and found {len(found) or 'none'}")
        return next(iter(found))

    def _covers(self, node: Any, line: int) -> bool:
        return bool(node.lineno <= line <= node.end_lineno)

    def _call(self, name: str) -> ast.Call:
        """The call of the method of this name at the line that the watch reported for it."""
        calls = [node for node in self._all(self.tree, ast.Call) if self._covers(node, self.lines[name])]
        named = [node for node in calls if self._code(node.func).endswith(f".{name}")]
        call: ast.Call = self._only(named, f"one call of {name}() at line {self.lines[name]}")
        return call

    def _calls(self, scope: Scope) -> list[ast.Call]:
        """The calls of a function."""
        name = getattr(scope, "name", "")
        calls = [node for node in self._all(self.tree, ast.Call) if self._code(node.func) == name]
        if not calls:
            raise UnknownForm(f"a call of {name}, by which to pass the pace, and found none")
        return calls

    def _assigned(self, scope: Scope) -> set[str]:
        """Names that are assigned in this function."""
        return {each for node in self._all(scope, ast.Assign) for each in self._targets(node)}

    def _scope(self, node: ast.AST) -> Scope:
        """The function that contains this node, or the module."""
        while not isinstance(node := self.above[node], Scope):
            pass
        return node

    def _whole(self, node: Any) -> Any:
        """The outermost ``if`` statement that contains this statement in a branch, or the statement itself."""
        while isinstance(above := self.above[node], ast.If) and "__name__" not in self._code(above.test):
            node = above
        return node

    def _targets(self, node: Any) -> list[str]:
        """The targets of an assignment, as text."""
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return [self._code(each) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]

    def _parameters(self, scope: Scope) -> list[str]:
        given = scope.args if isinstance(scope, ast.FunctionDef) else None
        if given is None or given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
            raise UnknownForm(f"plain parameters of {getattr(scope, 'name', 'a function')}, and found others")
        return [each.arg for each in given.args]

    # -- the text ---------------------------------------------------------------------------------------------

    def _span(self, node: Any) -> tuple[int, int]:
        starts = self.starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _code(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end].decode()

    def _of(self, call: Any) -> str:
        """The object whose method is called, as text."""
        return self._code(call.func.value)

    def _put(self, at: int, text: str) -> None:
        self.edits.append((at, at, text))

    def _behind(self, node: Any, line: str) -> None:
        self._put(self.starts[node.end_lineno], " " * node.col_offset + line + "\n")

    def _replace(self, node: ast.AST, text: str) -> None:
        self.edits.append((*self._span(node), text))
