"""Hypergradients: how a gradient at a lower solution becomes one at what the lower problem depends on.

One method a file, one signature: a `Pull` in, gradients by problem out.
"""

from memfit.multilevel.hypergradient.cg import cg
from memfit.multilevel.hypergradient.darts import darts
from memfit.multilevel.hypergradient.implicit import pulled_by_solving
from memfit.multilevel.hypergradient.method import Method
from memfit.multilevel.hypergradient.neumann import neumann
from memfit.multilevel.hypergradient.nystrom import nystrom
from memfit.multilevel.hypergradient.reinforce import reinforce
from memfit.multilevel.hypergradient.sama import sama
from memfit.multilevel.hypergradient.unrolled import unrolled

METHODS = {
    "darts": Method(pull=darts, second_order=False),
    "sama": Method(pull=sama, second_order=False),
    "neumann": Method(pull=pulled_by_solving, second_order=True, solver=neumann),
    "cg": Method(pull=pulled_by_solving, second_order=True, solver=cg),
    "nystrom": Method(pull=pulled_by_solving, second_order=True, solver=nystrom),
    "unrolled": Method(pull=unrolled, second_order=True),
    "reinforce": Method(pull=reinforce, second_order=False),
}
