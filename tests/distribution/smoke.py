"""What an installed packprop must do. It is told where that is, and knows nothing of the repository."""

import importlib.metadata
import sys
from pathlib import Path


def main(site: Path) -> None:
    import torch

    import packprop
    from packprop import backpack, extend, extensions

    folder = Path(packprop.__file__).parent
    assert folder == site / "packprop", f"{folder} was imported, not what was installed"
    assert (folder / "py.typed").exists()
    for name in packprop.__all__:
        getattr(packprop, name)
    model, loss = extend(torch.nn.Linear(4, 3)), extend(torch.nn.CrossEntropyLoss())
    with backpack(extensions.BatchGrad(), extensions.KFAC()):
        loss(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    assert torch.allclose(model.weight.grad_batch.sum(0), model.weight.grad, atol=1e-6)
    assert [list(factor.shape) for factor in model.weight.kfac] == [[3, 3], [4, 4]]
    described = importlib.metadata.metadata("packprop")
    assert described["License-Expression"] == "MIT"
    print(
        f"packprop {described['Version']} works from {folder.name}/ of a wheel, with torch {torch.__version__}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
