"""The command ``packprop``: a profile of a model on its data, from the shell."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import torch
from rich.console import Console
from torch import nn

from packprop import examples
from packprop.dataset.batches import BATCH_SIZE, described, explanation
from packprop.errors import BadInput, PackpropError
from packprop.memory.bytes import byte_text, resident_peak
from packprop.reports.profile.files import check_folder
from packprop.reports.profile.quantities import EXACT_OUTPUTS, LARGEST_FACTOR
from packprop.reports.profile.run import profile, version
from packprop.reports.profile.table import WIDTH

ASKED = "packprop profile was called."


OUTPUT = "profile"


DESCRIPTION = f"""\
What the gradients and the curvature of a network look like, layer by layer, in one pass over data.

in
  FACTORY names a function of yours that takes no arguments and returns three things:
    model  a torch.nn.Module, trained or not
    loss   one loss of torch, such as torch.nn.CrossEntropyLoss(), with reduction "mean" or "sum";
           or a function of (outputs, targets) that calls one
    data   a Dataset of (input, target); a tuple of tensors (inputs [n, ...], targets [n, ...]); or
           batches (inputs, targets), such as a DataLoader
  The current folder is searched first. Without FACTORY: a small residual network, trained for a
  few seconds on the 1797 handwritten digits of scikit-learn.

out
  a table on standard output, {WIDTH} columns wide, one row for each layer (module with trainable
  parameters; weight and bias together) and one for all:
    parameters         number of trainable ones
    grad norm          norm of the gradient of the mean loss over all samples
    sample median, 95% norm of the gradient of a sample's own loss: median and 95th percentile
    grad SNR           |mean gradient|^2 / trace of the covariance of the samples' gradients; its
                       inverse is the batch size at which noise is as large as signal
    GGN tr exact, MC   trace of the generalized Gauss-Newton matrix of the mean loss, exact and from
                       Monte Carlo draws of targets
    KFAC cond A, B     condition of the Kronecker factors: largest / smallest eigenvalue above
                       rounding error; "9/10" behind it: of rank 9 and size 10, thus singular;
                       "4608 wide": too large to be built
  A "-" is what was not computed or does not exist. The loss and the parameters are taken without
  units, so that no column has one. Losses that sum are divided by the number of samples first.
  DIR/profile.json         the table in full precision, with the settings that it was made with
  DIR/profile.safetensors  mean gradient and variance for each parameter, gradient norm and GGN
                           trace for each sample and layer, Kronecker factors, their eigenvalues
  Standard error gets a progress bar, warnings and errors.
"""


EXAMPLES = """\
examples
  packprop profile
  packprop profile my_project.train:factory --output runs/profile
  packprop profile train:factory --device cuda --batch-size 512 --mc-samples 8

  # train.py
  def factory():
      model = MyModel()
      model.load_state_dict(torch.load("model.pt"))
      return model, torch.nn.CrossEntropyLoss(), MyDataset()

exit status
  0 done, 1 an error inside packprop, 2 wrong input, 130 interrupted

The same from Python:
  profile = packprop.profile(model, loss, data)
  print(profile)
  profile.save("profile")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: Those of the command line; by default the ones that the process was given.
    """
    options = _parser().parse_args(arguments)
    started = time.perf_counter()
    try:
        with _shown_warnings(sys.stderr):
            _profile(options, started)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        elif isinstance(error, PackpropError):
            print(f"error: {error}", file=sys.stderr)
        else:
            unexpected = PackpropError(
                ASKED,
                "packprop itself",
                explanation(error),
                "run again with --debug, and report what it prints",
            )
            print(f"error: {unexpected}", file=sys.stderr)
        return 2 if isinstance(error, PackpropError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "packprop", description="More than the gradient from one backward pass of PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"packprop {version() or ''}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "profile",
        help="gradients and curvature of a network, layer by layer",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("factory", nargs="?", metavar="FACTORY", help="package.module:function")
    add(
        "--output",
        metavar="DIR",
        default=OUTPUT,
        help="folder for the two files, made if missing; older ones are replaced (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="samples in a batch, for data that do not come in batches; more memory, less time "
        f"(default: {BATCH_SIZE})",
    )
    add(
        "--mc-samples",
        type=_positive,
        metavar="N",
        default=1,
        help="Monte Carlo draws for each sample, a backward pass each (default: %(default)s)",
    )
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="compute the exact GGN trace, a backward pass for each output of a sample (default: "
        f"if these are at most {EXACT_OUTPUTS})",
    )
    add(
        "--curvature",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute GGN trace and Kronecker factors; losses without curvature need "
        "--no-curvature (default: yes)",
    )
    add(
        "--largest-factor",
        type=_positive,
        metavar="N",
        default=LARGEST_FACTOR,
        help="leave out Kronecker factors with more rows than this (default: %(default)s)",
    )
    add(
        "--keep-mode",
        action="store_true",
        help="leave the model in the mode that it comes in (default: evaluation mode, so that "
        "dropout is off and batch normalisation does not mix samples)",
    )
    add(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ...: where model, loss and batches are moved to (default: where the model is)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="of the random state that FACTORY finds, and of the draws (default: %(default)s)",
    )
    add(
        "--threads",
        type=_positive,
        metavar="N",
        help="CPU threads of torch (default: torch's own choice; 1 for the built-in example, whose "
        "tensors are too small to share)",
    )
    add(
        "--memory",
        metavar="BYTES",
        help="the most memory that tensors may take at once, such as 600MiB (default: no limit; chunks of "
        "samples are small anyway)",
    )
    add("--no-progress", action="store_true", help="show no progress bar")
    add("--debug", action="store_true", help="show errors with their tracebacks")
    return parser


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def _profile(options: argparse.Namespace, started: float) -> None:
    # what can be refused at once comes before the factory, which may take long
    check_folder(options.output)
    device = None if options.device is None else _device(options.device)
    factory = None if options.factory is None else _factory(options.factory)
    threads = options.threads or (1 if factory is None else None)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(options.seed)
    if factory is None:
        print("training a small residual network on handwritten digits ...", file=sys.stderr)
        model, loss, data = examples.digits(options.seed)
    else:
        model, loss, data = _made(factory, options.factory)
    if device is not None:
        model = model.to(device)
        loss = loss.to(device) if isinstance(loss, nn.Module) else loss
    found = profile(
        model,
        loss,
        data,
        batch_size=options.batch_size,
        mc_samples=options.mc_samples,
        exact=options.exact,
        curvature=options.curvature,
        largest_factor=options.largest_factor,
        evaluation=not options.keep_mode,
        seed=options.seed,
        progress=not options.no_progress,
        memory=options.memory,
    )
    paths = found.save(options.output)
    console = Console()
    if console.is_terminal:
        Console(width=max(console.width, WIDTH)).print(found)
    else:
        print(found)
    seconds = time.perf_counter() - started
    print(f"\nwrote {paths[0]} and {paths[1]} after {seconds:.0f} s", file=sys.stderr)
    resident = resident_peak()
    if options.memory is not None and resident is not None:  # the budget is over tensors alone
        told = f"resident in memory at most: {byte_text(resident)}, with Python and libraries"
        print(told, file=sys.stderr)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            ASKED, f"--device {name}", reason, "name a device that this torch can use, such as cpu"
        ) from error
    return device


def _factory(name: str) -> Callable[[], Any]:
    """The function that ``package.module:function`` names."""
    module_name, colon, path = name.partition(":")
    where = f"FACTORY, {name!r}"
    if not (module_name and colon and path) or module_name.endswith(".py") or "/" in module_name:
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise BadInput(
            ASKED,
            where,
            "it does not have the form package.module:function",
            f"name a module as in an import, and a function: {stem or 'train'}:{path or 'factory'}",
        )
    sys.path.insert(0, os.getcwd())
    found: Any
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            why = f"no module {missing!r} is in {os.getcwd()} or among the installed packages"
            instead = "run the command from the folder that holds it, or set PYTHONPATH"
        else:
            why = f"importing {module_name} failed: {explanation(error)}"
            instead = f"see that python -c 'import {module_name}' works"
        raise BadInput(ASKED, where, why, instead) from error
    for part in path.split("."):
        if not hasattr(found, part):
            functions = [key for key, value in vars(found).items() if callable(value)]
            own = [f for f in functions if getattr(vars(found)[f], "__module__", "") == module_name]
            own = [*own[:5], "..."] if len(own) > 5 else own
            raise BadInput(
                ASKED,
                where,
                f"{module_name} has no {path!r}",
                f"name a function of it: {', '.join(own) if own else 'it has none'}",
            )
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(
            ASKED,
            where,
            f"{path!r} is {described(found)}, which cannot be called",
            "name a function that returns (model, loss, data)",
        )
    return found  # type: ignore[no-any-return]


def _made(factory: Callable[[], Any], name: str) -> tuple[Any, Any, Any]:
    """What the factory returns, if that is three things."""
    where = f"FACTORY, {name!r}"
    instead = "return model, loss, data: a module, a loss function, and a data set or batches"
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise BadInput(
            ASKED, where, f"it raised {explanation(error)}", "see that it runs without arguments"
        ) from error
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        what = f"{len(made)} things" if isinstance(made, (tuple, list)) else described(made)
        raise BadInput(ASKED, where, f"it returned {what}, not three things", instead)
    model, loss, data = made
    return model, loss, data


@contextlib.contextmanager
def _shown_warnings(stream: TextIO) -> Iterator[None]:
    """Each warning once, without the line of code that it comes from."""
    shown = set()

    def show(message: Warning | str, *_: Any) -> None:
        text = textwrap.fill(f"warning: {message}", WIDTH, subsequent_indent="  ")
        if text not in shown:
            print(text, file=stream)
        shown.add(text)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


if __name__ == "__main__":
    sys.exit(main())
