"""The cockpit: pages for a browser, on `/` and below `/ui/`, over the same services as the JSON API.

    pages      the page itself and its files, none of which comes from elsewhere
    sessions   who looks: a login with a key, a cookie that is signed, a token against forged requests
    api        what pages ask beside the JSON API: the overview, lists of queues, histories, tasks that move messages
    static/    the page: Preact components without a build step
    vendor/    libraries of others, with version, license and hash; `vendored` fetches and checks them

The page changes things by the JSON API only. May import `gateway`, `app` and `marq`.
"""
