"""`python -m pipeline report`: one HTML page about the queues, from the table `lifecycle`.

`span` is the time that the report covers, `measures` what Spark counts in it, `wording` the sentences about it, `page`
the HTML. May import `pipeline` and `marq`. Counts are exact. Numbers of buckets, rows and sections limit what reaches
the driver.
"""

from pipeline.report.job import command

__all__ = ["command"]
