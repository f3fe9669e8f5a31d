"""Published sets, a file each: their addresses, checksums and formats."""

from data.sets.cifar10 import CIFAR10
from data.sets.enwik8 import ENWIK8
from data.sets.idx import FASHION_MNIST, MNIST
from data.sets.imdb import IMDB
from data.sets.lra_aan import AAN
from data.sets.lra_listops import LISTOPS
from data.sets.lra_pathfinder import PATHFINDERS
from data.sets.release import Release
from data.sets.wiki_links import WIKI_LINKS

SETS: dict[str, Release] = {
    one.name: one for one in (MNIST, FASHION_MNIST, CIFAR10, IMDB, ENWIK8, WIKI_LINKS, LISTOPS, AAN, *PATHFINDERS)
}
