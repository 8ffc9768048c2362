<?php
// AsyncAws (query protocol), as Debian has it. Arguments: see programs.py.
require '/usr/share/php/AsyncAws/Sqs/autoload.php';

use AsyncAws\Sqs\SqsClient;

[, $endpoint, $url, $scenario, $count] = $argv;
$sqs = new SqsClient([
    'endpoint' => $endpoint,
    'region' => 'us-east-1',
    'accessKeyId' => 'x',
    'accessKeySecret' => 'x',
]);

function say(array $line): void
{
    echo json_encode($line), "\n";
}

function receive(int $most): array
{
    global $sqs, $url;
    $answer = $sqs->receiveMessage([
        'QueueUrl' => $url,
        'MaxNumberOfMessages' => $most,
        'WaitTimeSeconds' => 5,
        'AttributeNames' => ['All'],
        'MessageAttributeNames' => ['All'],
    ]);
    return $answer->getMessages();
}

function got($m): void
{
    $n = $m->getMessageAttributes()['n'] ?? null;
    say([
        'got' => $m->getBody(),
        'id' => $m->getMessageId(),
        'receives' => $m->getAttributes()['ApproximateReceiveCount'],
        'group' => $m->getAttributes()['MessageGroupId'] ?? null,
        'n' => $n ? $n->getStringValue() : null,
    ]);
}

function change($m, int $seconds): void
{
    global $sqs, $url;
    $sqs->changeMessageVisibility([
        'QueueUrl' => $url,
        'ReceiptHandle' => $m->getReceiptHandle(),
        'VisibilityTimeout' => $seconds,
    ])->resolve();
}

function message(int $i): array
{
    global $url;
    $fifo = str_ends_with($url, '.fifo');
    return [
        'MessageBody' => "m-$i",
        'MessageAttributes' => ['n' => ['DataType' => 'Number', 'StringValue' => "$i"]],
    ] + ($fifo ? ['MessageGroupId' => 'g' . $i % 7, 'MessageDeduplicationId' => "d$i"] : []);
}

switch ($scenario) {
    case 'send':
        $sent = $sqs->sendMessage(['QueueUrl' => $url] + message(0));
        say(['sent' => 'm-0', 'id' => $sent->getMessageId()]);
        for ($i = 1; $i < $count;) {
            $entries = [];
            for (; $i < $count && count($entries) < 10; $i++) {
                $entries[] = ['Id' => "m-$i"] + message($i);
            }
            $answer = $sqs->sendMessageBatch(['QueueUrl' => $url, 'Entries' => $entries]);
            foreach ($answer->getFailed() as $failed) {
                fwrite(STDERR, 'not sent: ' . $failed->getMessage() . "\n");
            }
            foreach ($answer->getSuccessful() as $done) {
                say(['sent' => $done->getId(), 'id' => $done->getMessageId()]);
            }
        }
        break;
    case 'work':
        say(['ready' => true]);
        while ($count > 0) {
            $entries = [];
            foreach (receive(10) as $m) {
                got($m);
                $entries[] = ['Id' => $m->getMessageId(), 'ReceiptHandle' => $m->getReceiptHandle()];
            }
            if (!$entries) {
                continue;
            }
            $answer = $sqs->deleteMessageBatch(['QueueUrl' => $url, 'Entries' => $entries]);
            foreach ($answer->getFailed() as $failed) {
                fwrite(STDERR, 'not deleted: ' . $failed->getMessage() . "\n");
            }
            foreach ($answer->getSuccessful() as $done) {
                say(['deleted' => $done->getId()]);
                $count--;
            }
        }
        break;
    case 'heartbeat':
        $m = receive(1)[0];
        got($m);
        for ($i = 0; $i < $count; $i++) {
            sleep(1);
            change($m, 4);
        }
        $sqs->deleteMessage(['QueueUrl' => $url, 'ReceiptHandle' => $m->getReceiptHandle()])->resolve();
        say(['deleted' => $m->getMessageId()]);
        break;
    case 'fail':
        for ($i = 0; $i < $count; $i++) {
            $m = receive(1)[0];
            got($m);
            change($m, 0);
        }
        say(['left' => count(receive(1))]);
        break;
}
