"""Side by side with the plain eager run, and with the peers."""

from memfit.cli.torchvision_repair import prepare

prepare()  # before anything here imports torchvision or transformers
