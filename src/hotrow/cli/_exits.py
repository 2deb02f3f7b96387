"""Exit codes of the command line, next to 0 for success."""

UNEQUAL = 1  # a run that promises equality is not equal: a bug worth a report
USER_ERROR = 2
DIVERGED = 3  # the loss is no number any more
FAILED_STRATEGY = 4  # of a comparison, at least one; the others are there
INTERRUPTED = 130  # what shells report for a command that Ctrl-C has ended
