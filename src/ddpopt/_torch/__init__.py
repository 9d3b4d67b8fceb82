"""torch's private names: the only room that touches them, in wrappers sorted by torch's own parts.

`names` has them all in one table; the wrappers report facts and do what they are asked. Which mode
of DDP refuses what, and how users are told, is decided elsewhere. Each wrapper raises
`TorchDriftError` if the installed release lacks a name, unless it says otherwise.
"""

from ddpopt._torch.aot import *
from ddpopt._torch.buckets import *
from ddpopt._torch.compiled import *
from ddpopt._torch.copies import *
from ddpopt._torch.ddp import *
from ddpopt._torch.dynamo import *
from ddpopt._torch.graphs import *
from ddpopt._torch.groups import *
from ddpopt._torch.hidden import *
from ddpopt._torch.logs import *
from ddpopt._torch.modes import *
from ddpopt._torch.names import LOG_NAME as LOG_NAME
from ddpopt._torch.new_reducer import *
from ddpopt._torch.operators import *
from ddpopt._torch.optimizers import *
from ddpopt._torch.parameters import *
from ddpopt._torch.reducer import *
from ddpopt._torch.runtime import *
from ddpopt._torch.values import *
