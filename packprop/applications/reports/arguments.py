"""The command line of ``packprop``: its arguments and its help."""

from __future__ import annotations

import argparse

from packprop.applications.reports.commands import (
    Commands,
    add_debug,
    add_output_options,
    add_run_options,
    add_switch,
    new_command,
    positive,
)
from packprop.applications.reports.page.libraries import INSTALL
from packprop.applications.reports.profile.outlying import SHOWN
from packprop.applications.reports.profile.quantities import EXACT_OUTPUTS, LARGEST_FACTOR
from packprop.applications.reports.profile.table import WIDTH
from packprop.applications.reports.query import add_query
from packprop.store.describing import packprop_version

OUTPUT = "profile"
"""The default of ``--output``."""

DESCRIPTION = f"""\
Gradients and curvature of a network, layer by layer, in one pass over data.

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
    parameters         number of trainable parameters
    grad norm          norm of the gradient of the mean loss over all samples
    sample median, 95% norm of the gradient of a sample's own loss: median and 95th percentile
    grad SNR           |mean gradient|^2 / trace of the covariance of the samples' gradients; its
                       inverse is the batch size at which noise is as large as signal
    GGN tr exact, MC   trace of the generalized Gauss-Newton matrix of the mean loss, exact and from
                       Monte Carlo draws of targets
    KFAC cond A, B     condition of the Kronecker factors: largest / smallest eigenvalue above
                       rounding error; "9/10" after it: rank 9 of size 10, thus singular;
                       "4608 wide": too large to compute
  A "-" stands for a value that was not computed, or does not exist. Loss and parameters have no units here,
  so no column has one. A loss with reduction "sum" is divided by the number of samples first.
  DIR/profile.html         a page with figures, in one file: signal to noise, norms of single samples,
                           the samples with the largest gradients, curvature, spectra, memory and its
                           plan; needs {INSTALL},
                           and one more pass over the first batch
  DIR/profile.json         the table in full precision, with its settings
  DIR/profile.safetensors  mean gradient and variance for each parameter, gradient norm and GGN
                           trace for each sample and layer, Kronecker factors, their eigenvalues
  Standard error gets a progress bar (on a terminal), warnings and errors. NO_COLOR=1 switches colours
  off. Ctrl-C ends the run; with --checkpoint the same command continues it.
"""

EXIT_STATUS = """\
exit status
  0 done, 1 an error inside packprop, 2 wrong input, 130 interrupted;
  of a profile: 3 done, and the loss or its gradient is NaN or infinite"""

EXAMPLES = f"""\
examples
  packprop profile
  packprop profile packprop.examples:language_model --decode packprop.examples:decode
  packprop profile my_project.train:factory --output runs/profile
  packprop profile train:factory --device cuda --batch-size 512 --mc-samples 8

  # train.py
  def factory():
      model = MyModel()
      model.load_state_dict(torch.load("model.pt"))
      return model, torch.nn.CrossEntropyLoss(), MyDataset()

{EXIT_STATUS}

The same from Python:
  profile = packprop.profile(model, loss, data)
  print(profile)
  profile.save("profile")
  profile.save_page("profile/profile.html")
"""

COMPARE = """\
Two profiles of one model side by side, such as before and after training, with two optimizers, on two data
sets. Each difference comes with its standard error, from the spread between samples. A mark shows differences
of more than two standard errors.

in
  A and B are folders that `packprop profile` has written. The models must have the same layers; samples,
  settings and parameters may differ. If both profiles have the same samples, the command compares samples one
  by one, and errors are smaller.

out
  a table on standard output; with --json the whole comparison as JSON instead. --html FILE writes a page.
"""

PAGE = """\
Draw the page of a saved profile, without computing anything. The page lacks what the profile did not record,
such as the use of memory. For a file that ends in .jsonl, which packprop.Monitor(log="run.jsonl") has written,
draw the page of a training run: noise scale, signal to noise, outliers and curvature over steps.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    program = argparse.ArgumentParser(
        "packprop", description="More than the gradient from one backward pass of PyTorch."
    )
    program.add_argument("--version", action="version", version=f"packprop {packprop_version() or ''}")
    commands = program.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_profile(commands)
    _add_compare(commands)
    _add_page(commands)
    add_query(commands)
    return program


def _add_profile(commands: Commands) -> None:
    command = new_command(
        commands, "profile", "gradients and curvature of a network, layer by layer", DESCRIPTION, EXAMPLES
    )
    add = command.add_argument
    add("factory", nargs="?", metavar="FACTORY", help="package.module:function")
    add(
        "--output",
        metavar="DIR",
        default=OUTPUT,
        help="folder for the files; it is made if missing, and older files are replaced (default: %(default)s)",
    )
    add(
        "--mc-samples",
        type=positive,
        metavar="N",
        default=1,
        help="Monte Carlo draws for each sample, a backward pass each (default: %(default)s)",
    )
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="compute the exact GGN trace, a backward pass for each output of a sample (default: "
        f"if there are at most {EXACT_OUTPUTS})",
    )
    curvature = "compute GGN trace and Kronecker factors; losses without curvature need --no-curvature"
    add_switch(command, "--curvature", curvature)
    add(
        "--largest-factor",
        type=positive,
        metavar="N",
        default=LARGEST_FACTOR,
        help="leave out Kronecker factors with more rows than this (default: %(default)s)",
    )
    add_switch(command, "--compiled", "replace passes by traced graphs if that saves time")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads of torch (default: torch's own choice; 1 for the built-in example, whose "
        "tensors are too small for more)",
    )
    add(
        "--memory",
        metavar="BYTES",
        help="the most memory that tensors may take at once, such as 600MiB (default: no limit; packprop "
        "takes small chunks of samples in any case)",
    )
    kept = command.add_mutually_exclusive_group()
    kept.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="write checkpoints to this folder; if the run ends early, the same command continues it, provided "
        "that FACTORY returns the same model and data (default: no checkpoints)",
    )
    kept.add_argument(
        "--resume",
        metavar="FOLDER",
        help="like --checkpoint, but only continue a run: fail if FOLDER has no checkpoint",
    )
    add(
        "--every",
        type=_time_or_number,
        metavar="TIME",
        default="30s",
        help='how often to write the checkpoint: "30s", "5min", "1h", or a number of batches (default: '
        "%(default)s)",
    )
    add(
        "--outliers",
        type=_count,
        metavar="N",
        default=SHOWN,
        help="number of samples with the largest gradients to show; if data come in batches, the command reads "
        "them again up to the last of these samples (default: %(default)s)",
    )
    add(
        "--decode",
        metavar="NAME",
        help="package.module:function of (inputs, targets) of one sample, which returns its text, the text of "
        "each token of the targets, or an image",
    )
    add("--no-page", action="store_true", help="write no page, and do not measure memory")
    add_switch(command, "--progress", "show a progress bar, if standard error is a terminal")
    add_run_options(command)
    add_output_options(command, "the profile")


def _add_compare(commands: Commands) -> None:
    command = new_command(commands, "compare", "two profiles side by side", COMPARE, EXIT_STATUS)
    command.add_argument("first", metavar="A", help="folder of a profile")
    command.add_argument("second", metavar="B", help="folder of another profile")
    command.add_argument("--html", metavar="FILE", help=f"also write a page; needs {INSTALL}")
    add_output_options(command, "the comparison")


def _add_page(commands: Commands) -> None:
    command = new_command(commands, "page", "the page of a saved profile", PAGE, EXIT_STATUS)
    command.add_argument("folder", metavar="DIR", help="folder of a profile, or file of a monitor")
    command.add_argument(
        "--output", metavar="FILE", help="file of the page (default: DIR/profile.html; run.html for run.jsonl)"
    )
    add_debug(command)


def _time_or_number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
