"""`python -m pipeline report`: one HTML page that shows how the queues did, from the table `lifecycle`.

`span` is the time that is looked at, `measures` what Spark counts in it, `wording` the sentences that say what is
seen, `page` the HTML. May import `pipeline` and `marq`. Numbers are whole counts; what reaches the driver is bounded
by buckets, rows and sections.
"""

from pipeline.report.job import command

__all__ = ["command"]
